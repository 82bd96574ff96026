-- The end of an attempt in one round trip, where its reservation is settled with it and nothing else
-- follows. Mirrors celery_budget.store.attempts.end, which serves SQLite and what is left to it here;
-- one contract suite holds both to the same behaviour.
--
-- 'general' is answered, and nothing is changed, where the fence is gone, the request is cancelled or
-- part of a plan, or another attempt is to follow.
--
-- With p_close it is closed as well, unless a message of it has a lane or an order key.
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
    v_line record;
    v_now bigint;
    v_void text;
    v_charge numeric;
    v_lines smallint[];
    -- What is moved.
    v_budgets text[];
    v_windows bigint[];
    v_stripes smallint[];
    v_reserved bigint[];
    v_spent bigint[];
    v_whose uuid[];
BEGIN
    v_void := set_config('lock_timeout', p_lock_ms, true);
    outcome := 'general';
    SELECT r.state, r.attempts, r.cancelled_us, r.plan_id, r.over, r.unmetered, r.lane, r.task_id,
           r.owner, r.request_id, r.nesting
      INTO v_row
      FROM budget_reservations r
     WHERE r.root = p_root AND r.reservation_id = p_reservation
       FOR NO KEY UPDATE;
    IF NOT FOUND OR v_row.state <> 'running' OR v_row.attempts <> p_attempt
       OR v_row.cancelled_us IS NOT NULL OR v_row.plan_id IS NOT NULL
    THEN
        RETURN NEXT;
        RETURN;
    END IF;
    was_over := v_row.over;
    was_unmetered := v_row.unmetered;
    -- By another snapshot than the lock was waited for with. All that there is to know in one look:
    -- each line, and beside it what is the same of all.
    FOR v_line IN
        SELECT l.line, l.budget, l.window_us, l.stripe, l.unit, l.charge, l.reserved, l.used,
               l.settled, l.estimate::numeric + l.extended AS promised,
               EXISTS (
                SELECT 1 FROM budget_attempts a
                 WHERE a.root = p_root AND a.reservation_id = p_reservation
                   AND a.attempt = p_attempt AND a.claim_id = p_claim)
               AND NOT EXISTS (
                SELECT 1 FROM budget_outbox o
                 WHERE o.root = p_root AND o.reservation_id = p_reservation
                   AND o.state = 'blocked' AND o.after_attempt = p_attempt)
               AND NOT EXISTS (
                SELECT 1 FROM budget_parked k
                 WHERE k.root = p_root AND k.reservation_id = p_reservation
                   AND k.after_attempt = p_attempt) AS alone,
               p_close AND NOT EXISTS (
                SELECT 1 FROM budget_outbox o
                 WHERE o.root = p_root AND o.reservation_id = p_reservation
                   AND (o.lane IS NOT NULL OR o.order_key IS NOT NULL)) AS closes,
               -- What it told, and what it was given of an earlier attempt that had an effect.
               ARRAY(
                SELECT u.unit
                  FROM budget_usage u
                 WHERE p_kind = 'returned' AND u.root = p_root
                   AND u.reservation_id = p_reservation
                   AND (u.attempt = p_attempt OR u.repeated_by = p_attempt
                        OR (p_attempt > 1 AND u.attempt IN (
                            SELECT e.attempt FROM budget_effects e
                             WHERE e.root = p_root AND e.reservation_id = p_reservation
                               AND e.attempt < p_attempt)))) AS told
          FROM (SELECT 1) AS one
          LEFT JOIN budget_lines l ON l.root = p_root AND l.reservation_id = p_reservation
         ORDER BY l.line
    LOOP
        IF NOT v_line.alone THEN
            RETURN NEXT;
            RETURN;
        END IF;
        closed := v_line.closes;
        CONTINUE WHEN v_line.line IS NULL;
        v_charge := CASE WHEN v_line.charge = 'start' THEN v_line.settled ELSE v_line.used END;
        -- Of what a success told nothing it is taken to have used what was estimated.
        IF p_kind = 'returned' AND v_line.charge = 'used'
           AND v_line.unit <> ALL (v_line.told) THEN
            v_charge := v_charge + v_line.promised;
            was_unmetered := true;
        END IF;
        IF greatest(v_charge, v_line.promised) > c_most THEN
            RETURN NEXT;
            RETURN;
        END IF;
        v_lines := v_lines || v_line.line;
        budgets := budgets || v_line.budget::text;
        units := units || v_line.unit::text;
        estimated := estimated || v_line.promised::bigint;
        used := used || v_line.used;
        charged := charged || v_charge::bigint;
        IF v_line.reserved <> 0 OR v_charge <> v_line.settled THEN
            v_budgets := v_budgets || v_line.budget::text;
            v_windows := v_windows || v_line.window_us;
            v_stripes := v_stripes || v_line.stripe;
            v_reserved := v_reserved || -v_line.reserved;
            v_spent := v_spent || (v_charge - v_line.settled)::bigint;
            v_whose := v_whose || p_reservation;
        END IF;
    END LOOP;

    -- The commonest by one statement: of its one line it gives back what it has not used.
    IF cardinality(v_lines) = 1 AND v_reserved[1] <= -v_spent[1] THEN
        WITH moved AS (
            UPDATE budget_balances b
               SET reserved = b.reserved + v_reserved[1], spent = b.spent + v_spent[1],
                   entries = b.entries + 1
             WHERE b.root = p_root AND b.budget = v_budgets[1] AND b.window_us = v_windows[1]
               AND b.stripe = v_stripes[1]
            RETURNING b.reserved, b.spent, b.entries,
                      CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint) AS at_us
        ), entry AS (
            INSERT INTO budget_journal (
                root, budget, window_us, stripe, entry, at_us, what, who, reservation_id,
                reserved, spent, reserved_after, spent_after)
            SELECT p_root, v_budgets[1], v_windows[1], v_stripes[1], m.entries, m.at_us, 'settle',
                   p_who, p_reservation, v_reserved[1], v_spent[1], m.reserved, m.spent
              FROM moved m
        ), line AS (
            UPDATE budget_lines l SET reserved = 0, settled = charged[1]
              FROM moved
             WHERE l.root = p_root AND l.reservation_id = p_reservation AND l.line = v_lines[1]
        ), request AS (
            UPDATE budget_reservations r
               SET state = 'settled', unmetered = was_unmetered, ended_us = m.at_us
              FROM moved m
             WHERE r.root = p_root AND r.reservation_id = p_reservation
        ), attempt AS (
            UPDATE budget_attempts a
               SET ended_us = m.at_us, outcome = p_kind, error = p_error,
                   payload = CASE WHEN NOT closed THEN p_payload END,
                   lease_until_us = CASE WHEN NOT closed THEN a.lease_until_us END
              FROM moved m
             WHERE a.root = p_root AND a.reservation_id = p_reservation AND a.attempt = p_attempt
        ), message AS (
            DELETE FROM budget_outbox o
             USING moved
             WHERE closed AND o.root = p_root AND o.reservation_id = p_reservation
        )
        SELECT m.at_us INTO v_now FROM moved m;
    END IF;
    IF v_now IS NULL THEN
        IF v_budgets IS NOT NULL THEN
            PERFORM budget_move(
                p_root, v_budgets, v_windows, v_stripes, v_reserved, v_spent, v_whose, 'settle',
                p_who, NULL);
        END IF;
        UPDATE budget_lines l SET reserved = 0, settled = c.charge
          FROM unnest(v_lines, charged) AS c (line, charge)
         WHERE l.root = p_root AND l.reservation_id = p_reservation AND l.line = c.line;
        v_now := CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint);
        UPDATE budget_reservations r
           SET state = 'settled', unmetered = was_unmetered, ended_us = v_now
         WHERE r.root = p_root AND r.reservation_id = p_reservation;
        UPDATE budget_attempts a
           SET ended_us = v_now, outcome = p_kind, error = p_error,
               payload = CASE WHEN NOT closed THEN p_payload END,
               lease_until_us = CASE WHEN NOT closed THEN a.lease_until_us END
         WHERE a.root = p_root AND a.reservation_id = p_reservation AND a.attempt = p_attempt;
        IF closed THEN
            DELETE FROM budget_outbox o
             WHERE o.root = p_root AND o.reservation_id = p_reservation;
        END IF;
    END IF;
    IF p_kind = 'returned' AND p_payload IS NOT NULL
       AND (starts_with(v_row.request_id, p_reuses) OR v_row.nesting > 0) THEN
        UPDATE budget_reuse u SET payload = p_payload, until_us = v_now + u.kept_us
         WHERE u.root = p_root AND u.task_id = v_row.task_id AND u.owner = v_row.owner;
    END IF;
    IF v_row.lane IS NOT NULL THEN
        PERFORM budget_wake(p_root);
    END IF;
    outcome := 'settled';
    RETURN NEXT;
END
$$
