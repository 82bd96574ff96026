-- A budget's window may be spread over several rows, its stripes. Each has a share of the bound for
-- new work, and admits alone what fits its share. The shares add up to the bound they were made by
-- (basis), and no stripe is above its share: so all together are within the bound. Where that does
-- not hold, after use beyond the bound or a change of the number of stripes, basis is -1, and nobody
-- admits by one stripe. A window with one row has neither.

-- The bound for new work that is in force at p_now.
CREATE FUNCTION budget_bound(p_root text, p_budget text, p_now bigint)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_limit numeric := budget_limit(p_root, p_budget, p_now);
BEGIN
    IF v_limit IS NULL THEN
        RETURN 9223372036854775807;
    END IF;
    RETURN (SELECT div(v_limit * b.soft_stop, 1000000)
              FROM budget_budgets b
             WHERE b.root = p_root AND b.name = p_budget);
END
$$;

-- Locks all stripes of a window, in order. Whoever adds one holds the first: behind that lock all
-- there are can be seen.
CREATE FUNCTION budget_whole(p_root text, p_budget text, p_window bigint)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM budget_balances b
      WHERE b.root = p_root AND b.budget = p_budget AND b.window_us = p_window AND b.stripe = 0
        FOR UPDATE;
    PERFORM 1 FROM budget_balances b
      WHERE b.root = p_root AND b.budget = p_budget AND b.window_us = p_window AND b.stripe > 0
      ORDER BY b.stripe
        FOR UPDATE;
END
$$;

-- Shares what is left of a window among its stripes, with p_amount for one of them, which it
-- returns: the one named, or any by p_pick. The caller holds all of them.
CREATE FUNCTION budget_allot(
    p_root text, p_budget text, p_window bigint, p_stripe smallint, p_amount bigint, p_pick integer,
    p_basis bigint
) RETURNS smallint LANGUAGE plpgsql AS $$
DECLARE
    v_spread smallint;
    v_stripe smallint;
    v_left numeric;
BEGIN
    SELECT b.spread INTO v_spread
      FROM budget_budgets b WHERE b.root = p_root AND b.name = p_budget;
    v_stripe := coalesce(p_stripe, mod(p_pick, v_spread));
    SELECT p_basis - p_amount - sum(b.reserved) - sum(b.spent) INTO v_left
      FROM budget_balances b
     WHERE b.root = p_root AND b.budget = p_budget AND b.window_us = p_window;
    IF v_left < 0 THEN
        UPDATE budget_balances b SET basis = -1
         WHERE b.root = p_root AND b.budget = p_budget AND b.window_us = p_window AND b.basis >= 0;
        RETURN v_stripe;
    END IF;
    UPDATE budget_balances b SET basis = p_basis, share = n.share
      FROM (SELECT c.stripe,
                   CAST(c.reserved + c.spent
                        + CASE WHEN c.stripe < v_spread THEN div(v_left, v_spread) ELSE 0 END
                        + CASE WHEN c.stripe = v_stripe THEN p_amount + mod(v_left, v_spread)
                               ELSE 0 END AS bigint) AS share
              FROM budget_balances c
             WHERE c.root = p_root AND c.budget = p_budget AND c.window_us = p_window) AS n
     WHERE b.root = p_root AND b.budget = p_budget AND b.window_us = p_window
       AND b.stripe = n.stripe AND (b.basis <> p_basis OR b.share <> n.share);
    RETURN v_stripe;
END
$$;

-- Locks what an admission draws on, one after another in the order (budget, window, stripe), and
-- returns the stripes: where one is locked by another, the next that has room. A stripe of NULL: all
-- of them are locked. With p_count it is noted where somebody else had the lock: it stands for eight.
CREATE FUNCTION budget_take(
    p_root text, p_budgets text[], p_windows bigint[], p_stripes smallint[], p_amounts bigint[],
    p_count boolean
) RETURNS smallint[] LANGUAGE plpgsql AS $$
DECLARE
    v record;
    v_taken smallint[] := p_stripes;
    v_other smallint;
BEGIN
    FOR v IN
        SELECT d.budget, d.window_us, d.stripe, d.amount, d.n
          FROM unnest(p_budgets, p_windows, p_stripes, p_amounts)
               WITH ORDINALITY AS d (budget, window_us, stripe, amount, n)
         ORDER BY d.budget COLLATE "C", d.window_us, coalesce(d.stripe, -1)
    LOOP
        IF v.stripe IS NULL THEN
            PERFORM budget_whole(p_root, v.budget, v.window_us);
            CONTINUE;
        END IF;
        PERFORM 1 FROM budget_balances b
          WHERE b.root = p_root AND b.budget = v.budget AND b.window_us = v.window_us
            AND b.stripe = v.stripe
            FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN FOUND;
        -- By its key alone: what is looked at behind a lock, and found to be otherwise by then, is
        -- passed by and stays locked, and the one that is waited for below comes before it.
        SELECT b.stripe INTO v_other
          FROM (SELECT c.stripe FROM budget_balances c
                 WHERE c.root = p_root AND c.budget = v.budget AND c.window_us = v.window_us
                   AND c.stripe > v.stripe AND c.basis >= 0
                   AND c.share - c.reserved - c.spent >= v.amount
                 ORDER BY c.stripe
                OFFSET 0) AS n
          JOIN budget_balances b
            ON b.root = p_root AND b.budget = v.budget AND b.window_us = v.window_us
           AND b.stripe = n.stripe
         ORDER BY n.stripe
         LIMIT 1
           FOR UPDATE OF b SKIP LOCKED;
        IF FOUND THEN
            v_taken[v.n] := v_other;
        ELSE
            v_other := v.stripe;
            PERFORM 1 FROM budget_balances b
              WHERE b.root = p_root AND b.budget = v.budget AND b.window_us = v.window_us
                AND b.stripe = v_other
                FOR UPDATE;
        END IF;
        IF p_count THEN
            UPDATE budget_balances b SET waits = b.waits + 8
             WHERE b.root = p_root AND b.budget = v.budget AND b.window_us = v.window_us
               AND b.stripe = v_other;
        END IF;
    END LOOP;
    RETURN v_taken;
END
$$;

-- Locks balances that are to grow, in order: each stripe alone where its share has room for it,
-- otherwise all of its window. False where one that was locked alone had no room then: what else is
-- to be locked may come before what is locked already, and the caller gives all of it back.
--
-- With p_use it grows whatever the bound is; otherwise the shares have to be those of the bound that
-- is in force.
CREATE FUNCTION budget_hold(
    p_root text, p_budgets text[], p_windows bigint[], p_stripes smallint[], p_more numeric[],
    p_use boolean
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v record;
    v_row record;
    v_now bigint := CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint);
    v_alone boolean;
    v_behind boolean;
    v_whole text[] := '{}';
BEGIN
    FOR v IN
        SELECT d.budget, d.window_us, d.stripe, sum(d.more) AS more
          FROM unnest(p_budgets, p_windows, p_stripes, p_more) AS d (budget, window_us, stripe, more)
         GROUP BY d.budget, d.window_us, d.stripe
         ORDER BY d.budget COLLATE "C", d.window_us, d.stripe
    LOOP
        FOREACH v_behind IN ARRAY ARRAY[false, true] LOOP
            SELECT b.reserved::numeric + b.spent AS used, b.share, b.basis INTO v_row
              FROM budget_balances b
             WHERE b.root = p_root AND b.budget = v.budget AND b.window_us = v.window_us
               AND b.stripe = v.stripe;
            v_alone := coalesce(
                v_row.share IS NULL OR v.more <= 0
                OR (v_row.basis >= 0 AND v_row.used + v.more <= v_row.share
                    AND v_row.basis = CASE WHEN p_use THEN v_row.basis
                                           ELSE budget_bound(p_root, v.budget, v_now) END),
                true);
            IF v_behind THEN
                IF NOT v_alone AND v.budget || chr(1) || v.window_us <> ALL (v_whole) THEN
                    RETURN false;
                END IF;
            ELSIF v_alone THEN
                PERFORM 1 FROM budget_balances b
                  WHERE b.root = p_root AND b.budget = v.budget AND b.window_us = v.window_us
                    AND b.stripe = v.stripe
                    FOR UPDATE;
            ELSE
                PERFORM budget_whole(p_root, v.budget, v.window_us);
                v_whole := v_whole || (v.budget || chr(1) || v.window_us);
            END IF;
        END LOOP;
    END LOOP;
    RETURN true;
END
$$;

-- Which stripe a batch draws on for each budget, by a look and without locks: NULL for all of them.
CREATE FUNCTION budget_place(
    p_root text, p_budgets text[], p_windows bigint[], p_amounts numeric[], p_pick integer
) RETURNS smallint[] LANGUAGE plpgsql AS $$
DECLARE
    v_now bigint := CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint);
    v_stripes smallint[] := '{}';
    v_stripe smallint;
    v_spread integer;
    v_bound bigint;
BEGIN
    FOR i IN 1 .. cardinality(p_budgets) LOOP
        v_stripe := 0;
        IF EXISTS (
            SELECT 1 FROM budget_balances b
             WHERE b.root = p_root AND b.budget = p_budgets[i] AND b.window_us = p_windows[i]
               AND b.stripe = 0 AND b.share IS NOT NULL
        ) THEN
            v_bound := budget_bound(p_root, p_budgets[i], v_now);
            SELECT b.spread INTO v_spread
              FROM budget_budgets b WHERE b.root = p_root AND b.name = p_budgets[i];
            v_stripe := (
                SELECT b.stripe FROM budget_balances b
                 WHERE b.root = p_root AND b.budget = p_budgets[i] AND b.window_us = p_windows[i]
                   AND b.stripe < v_spread AND b.basis = v_bound
                   AND b.share::numeric - b.reserved - b.spent >= p_amounts[i]
                 ORDER BY mod(b.stripe - mod(p_pick, v_spread) + v_spread, v_spread)
                 LIMIT 1);
        END IF;
        v_stripes := v_stripes || v_stripe;
    END LOOP;
    RETURN v_stripes;
END
$$;

-- The stripes that a batch draws its amounts from, which it has locked (NULL: all of them), with
-- room for them by the bounds at p_now, or now; NULL in whole where one that was locked alone has
-- none any more.
CREATE FUNCTION budget_gather(
    p_root text, p_budgets text[], p_windows bigint[], p_stripes smallint[], p_amounts bigint[],
    p_pick integer, p_now bigint
) RETURNS smallint[] LANGUAGE plpgsql AS $$
DECLARE
    v_stripes smallint[] := p_stripes;
    v_now bigint := coalesce(
        p_now, CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint));
BEGIN
    FOR i IN 1 .. cardinality(p_budgets) LOOP
        IF p_stripes[i] IS NULL THEN
            v_stripes[i] := budget_allot(
                p_root, p_budgets[i], p_windows[i], NULL, p_amounts[i], p_pick,
                budget_bound(p_root, p_budgets[i], v_now));
        ELSE
            PERFORM 1 FROM budget_balances b
              WHERE b.root = p_root AND b.budget = p_budgets[i] AND b.window_us = p_windows[i]
                AND b.stripe = p_stripes[i]
                AND (b.share IS NULL
                     OR (b.reserved::numeric + b.spent + p_amounts[i] <= b.share
                         AND b.basis = budget_bound(p_root, p_budgets[i], v_now)));
            IF NOT FOUND THEN
                RETURN NULL;
            END IF;
        END IF;
    END LOOP;
    RETURN v_stripes;
END
$$
