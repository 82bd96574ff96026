-- The end of an attempt in one round trip, where its reservation is settled with it and nothing else
-- follows. Mirrors celery_budget.store.attempts.end, which serves SQLite and what is left to it here;
-- one contract suite holds both to the same behaviour.
--
-- 'general' is answered, and nothing is changed, where the fence is gone, the request is cancelled or
-- part of a plan, or another attempt is to follow.
--
-- With p_close it is closed as well, unless budget_close leaves it.
--
-- Locks: the reservation, its balances in the order (budget, window, stripe), its messages.
CREATE FUNCTION budget_end(
    p_root text, p_reservation uuid, p_attempt integer, p_claim uuid, p_kind text, p_payload text,
    p_error text, p_reuses text, p_close boolean, p_who text, p_lock_ms text
) RETURNS TABLE (
    outcome text, closed boolean, budgets text[], units text[], estimated bigint[], used bigint[],
    charged bigint[], was_over boolean, was_unmetered boolean
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    c_most CONSTANT numeric := 9223372036854775807;
    v_row record;
    v_now bigint;
    v record;
BEGIN
    PERFORM set_config('lock_timeout', p_lock_ms, true);
    SELECT r.state, r.attempts, r.cancelled_us, r.plan_id, r.over, r.unmetered, r.lane, r.task_id,
           r.owner, r.request_id, r.nesting
      INTO v_row
      FROM budget_reservations r
     WHERE r.root = p_root AND r.reservation_id = p_reservation
       FOR NO KEY UPDATE;
    IF NOT FOUND OR v_row.state <> 'running' OR v_row.attempts <> p_attempt
       OR v_row.cancelled_us IS NOT NULL OR v_row.plan_id IS NOT NULL
       OR NOT EXISTS (
            SELECT 1 FROM budget_attempts a
             WHERE a.root = p_root AND a.reservation_id = p_reservation AND a.attempt = p_attempt
               AND a.claim_id = p_claim)
       OR EXISTS (
            SELECT 1 FROM budget_outbox o
             WHERE o.root = p_root AND o.reservation_id = p_reservation AND o.state = 'blocked'
               AND o.after_attempt = p_attempt)
       OR EXISTS (
            SELECT 1 FROM budget_parked k
             WHERE k.root = p_root AND k.reservation_id = p_reservation
               AND k.after_attempt = p_attempt)
    THEN
        RETURN QUERY SELECT 'general', false, NULL::text[], NULL::text[], NULL::bigint[],
            NULL::bigint[], NULL::bigint[], false, false;
        RETURN;
    END IF;
    -- What a success used of a unit of which it, and what it was given of an earlier one that had an
    -- effect, told nothing is taken to be what was estimated.
    WITH told AS (
        SELECT DISTINCT u.unit
          FROM budget_usage u
         WHERE u.root = p_root AND u.reservation_id = p_reservation
           AND (u.attempt = p_attempt OR u.repeated_by = p_attempt
                OR (p_attempt > 1 AND u.attempt IN (
                    SELECT e.attempt FROM budget_effects e
                     WHERE e.root = p_root AND e.reservation_id = p_reservation
                       AND e.attempt < p_attempt)))
    ), line AS (
        SELECT l.line, l.budget, l.window_us, l.stripe, l.unit, l.charge, l.reserved, l.used,
               l.settled, l.estimate::numeric + l.extended AS promised,
               p_kind = 'returned' AND l.charge = 'used'
               AND l.unit NOT IN (SELECT t.unit FROM told t) AS untold
          FROM budget_lines l
         WHERE l.root = p_root AND l.reservation_id = p_reservation
    ), charge AS (
        SELECT l.*, CASE WHEN l.charge = 'start' THEN l.settled
                         WHEN l.untold THEN l.used + l.promised
                         ELSE l.used END AS due
          FROM line l
    )
    SELECT array_agg(c.line ORDER BY c.line) AS lines,
           array_agg(c.budget::text ORDER BY c.line) AS budgets,
           array_agg(c.window_us ORDER BY c.line) AS windows,
           array_agg(c.stripe ORDER BY c.line) AS stripes,
           array_agg(c.unit::text ORDER BY c.line) AS units,
           array_agg(c.promised ORDER BY c.line) AS promised,
           array_agg(c.reserved ORDER BY c.line) AS reserved,
           array_agg(c.used ORDER BY c.line) AS used,
           array_agg(c.settled ORDER BY c.line) AS settled,
           array_agg(c.due ORDER BY c.line) AS due,
           coalesce(bool_or(c.untold), false) AS untold,
           coalesce(bool_or(greatest(c.due, c.promised) > c_most), false) AS vast
      INTO v
      FROM charge c;
    IF v.vast THEN
        RETURN QUERY SELECT 'general', false, NULL::text[], NULL::text[], NULL::bigint[],
            NULL::bigint[], NULL::bigint[], false, false;
        RETURN;
    END IF;
    PERFORM budget_move(
        p_root, array_agg(m.budget ORDER BY m.line), array_agg(m.window_us ORDER BY m.line),
        array_agg(m.stripe ORDER BY m.line), array_agg(-m.reserved ORDER BY m.line),
        array_agg((m.due - m.settled)::bigint ORDER BY m.line),
        array_agg(p_reservation), 'settle', p_who, NULL)
       FROM unnest(v.lines, v.budgets, v.windows, v.stripes, v.reserved, v.due, v.settled)
            AS m (line, budget, window_us, stripe, reserved, due, settled)
      WHERE m.reserved <> 0 OR m.due <> m.settled
     HAVING count(*) > 0;
    UPDATE budget_lines l
       SET reserved = 0, settled = c.due
      FROM unnest(v.lines, v.due) AS c (line, due)
     WHERE l.root = p_root AND l.reservation_id = p_reservation AND l.line = c.line;
    v_now := CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint);
    UPDATE budget_reservations r
       SET state = 'settled', unmetered = r.unmetered OR v.untold, ended_us = v_now
     WHERE r.root = p_root AND r.reservation_id = p_reservation;
    UPDATE budget_attempts a
       SET ended_us = v_now, outcome = p_kind, error = p_error, payload = p_payload
     WHERE a.root = p_root AND a.reservation_id = p_reservation AND a.attempt = p_attempt;
    IF p_kind = 'returned' AND p_payload IS NOT NULL
       AND (starts_with(v_row.request_id, p_reuses) OR v_row.nesting > 0) THEN
        UPDATE budget_reuse u SET payload = p_payload, until_us = v_now + u.kept_us
         WHERE u.root = p_root AND u.task_id = v_row.task_id AND u.owner = v_row.owner;
    END IF;
    IF v_row.lane IS NOT NULL THEN
        PERFORM budget_wake(p_root);
    END IF;
    RETURN QUERY SELECT 'settled',
        p_close AND budget_close(
            p_root, ARRAY[p_reservation], ARRAY[p_attempt], ARRAY[p_claim]) = '{}',
        v.budgets, v.units, v.promised::bigint[], v.used, v.due::bigint[], v_row.over,
        v_row.unmetered OR v.untold;
END
$$
