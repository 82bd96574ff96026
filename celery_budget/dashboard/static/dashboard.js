// Keeps a page as it is on the server: asks for it again and changes what differs, in place, so
// that focus, selection and what is opened stay. Everything works without it, but by hand.
"use strict";
(() => {
  const EVERY = 2000, MOST = 10000, PATIENCE = 15000;
  const main = document.getElementById("main");
  const told = document.getElementById("connection");
  const pause = document.getElementById("pause");
  let paused = false, failures = 0, timer = null, asking = null;

  document.documentElement.classList.add("js");

  // What differs is changed; rows are the same where their keys are.
  const key = (node) => (node.nodeType === 1 ? node.dataset.key || node.id || "" : "");

  function patch(old, fresh) {
    if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || key(old) !== key(fresh)) {
      old.replaceWith(document.importNode(fresh, true));
      return;
    }
    if (old.nodeType !== 1) {
      if (old.data !== fresh.data) old.data = fresh.data;
      return;
    }
    for (const { name, value } of fresh.attributes) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    for (const { name } of [...old.attributes]) {
      if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
    }
    const keyed = new Map();
    for (const child of old.childNodes) if (key(child)) keyed.set(key(child), child);
    let at = old.firstChild;
    for (const wanted of fresh.childNodes) {
      const name = key(wanted);
      let found = name ? keyed.get(name) : at;
      if (found && !name && (key(found) || found.nodeName !== wanted.nodeName)) found = null;
      if (!found) {
        old.insertBefore(document.importNode(wanted, true), at);
        continue;
      }
      keyed.delete(name);
      if (found === at) at = at.nextSibling;
      else old.insertBefore(found, at);
      patch(found, wanted);
    }
    while (at) {
      const next = at.nextSibling;
      at.remove();
      at = next;
    }
  }

  function show(page) {
    const fresh = page.getElementById("main");
    if (!fresh || fresh.dataset.page !== main.dataset.page) {
      location.reload();
      return;
    }
    const focused = document.activeElement;
    for (const part of fresh.querySelectorAll("[data-live]")) {
      const old = document.getElementById(part.id);
      if (old) patch(old, part);
    }
    const here = new Set([...fresh.querySelectorAll("[data-live]")].map((part) => part.id));
    const mine = [...main.querySelectorAll("[data-live]")].map((part) => part.id);
    if (mine.length !== here.size || mine.some((id) => !here.has(id))) location.reload();
    if (focused && focused.isConnected && focused !== document.activeElement) {
      focused.focus({ preventScroll: true });
    }
  }

  function tell(words) {
    if (!told) return;
    if (told.textContent !== words) told.textContent = words;
    told.hidden = !words;
  }

  async function ask() {
    timer = null;
    const mine = new AbortController();
    asking = mine;
    const late = setTimeout(() => mine.abort(), PATIENCE);
    try {
      const answer = await fetch(location.href, { cache: "no-store", signal: mine.signal });
      const text = await answer.text();
      if (asking !== mine) return;
      if (answer.status === 401 || answer.status === 403) {
        tell("The session is over: open the page again with the token.");
        return;
      }
      const page = new DOMParser().parseFromString(text, "text/html");
      const why = page.querySelector("[data-status]");
      if (answer.status === 404 && main.dataset.page !== "error") {
        tell("This is not there any more.");
        failures += 1;
      } else if (!answer.ok) {
        if (main.dataset.page !== "error") {
          tell(`${why ? why.textContent.trim() : "The dashboard has a fault."} Trying again; what is shown is older.`);
        }
        failures += 1;
      } else {
        show(page);
        tell("");
        failures = 0;
      }
    } catch {
      if (asking !== mine) return;
      failures += 1;
      tell("The dashboard does not answer. Trying again; what is shown is older.");
    } finally {
      clearTimeout(late);
    }
    if (asking === mine) plan();
  }

  function plan() {
    if (timer !== null || paused || document.hidden) return;
    timer = setTimeout(ask, Math.min(EVERY * 2 ** Math.min(failures, 8), MOST));
  }

  function stop() {
    clearTimeout(timer);
    timer = null;
    if (asking) {
      const mine = asking;
      asking = null;
      mine.abort();
    }
  }

  function go() {
    stop();
    if (!paused && !document.hidden) ask();
  }

  document.addEventListener("visibilitychange", go);
  window.addEventListener("online", go);

  if (pause) {
    pause.hidden = false;
    pause.addEventListener("click", () => {
      paused = !paused;
      pause.textContent = paused ? "Go on" : "Pause";
      go();
    });
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const code = button.parentElement.querySelector("code");
    let done = true;
    try {
      await navigator.clipboard.writeText(button.dataset.copy);
    } catch {
      // Without a secure connection there is no clipboard: what is selected can be copied by hand.
      done = false;
      getSelection().selectAllChildren(code);
    }
    button.firstChild.data = done ? "Copied" : "Selected";
    setTimeout(() => { button.firstChild.data = "Copy"; }, 1500);
  });

  // A page that shows an error is asked for again where that may help.
  const status = document.querySelector("[data-status]");
  if (main && (!status || Number(status.dataset.status) >= 500)) plan();
})();
