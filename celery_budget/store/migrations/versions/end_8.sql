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
    v_told text[];
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
    PERFORM set_config('lock_timeout', p_lock_ms, true);
    outcome := 'general';
    SELECT r.state, r.attempts, r.cancelled_us, r.plan_id, r.over, r.unmetered, r.lane, r.task_id,
           r.owner, r.request_id, r.nesting
      INTO v_row
      FROM budget_reservations r
     WHERE r.root = p_root AND r.reservation_id = p_reservation
       FOR NO KEY UPDATE;
    -- By another snapshot than the lock was waited for with.
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
        RETURN NEXT;
        RETURN;
    END IF;
    was_over := v_row.over;
    was_unmetered := v_row.unmetered;
    IF p_kind = 'returned' THEN
        -- What it told, and what it was given of an earlier attempt that had an effect.
        SELECT array_agg(u.unit) INTO v_told
          FROM budget_usage u
         WHERE u.root = p_root AND u.reservation_id = p_reservation
           AND (u.attempt = p_attempt OR u.repeated_by = p_attempt
                OR (p_attempt > 1 AND u.attempt IN (
                    SELECT e.attempt FROM budget_effects e
                     WHERE e.root = p_root AND e.reservation_id = p_reservation
                       AND e.attempt < p_attempt)));
    END IF;
    FOR v_line IN
        SELECT l.line, l.budget, l.window_us, l.stripe, l.unit, l.charge, l.reserved, l.used,
               l.settled, l.estimate::numeric + l.extended AS promised
          FROM budget_lines l
         WHERE l.root = p_root AND l.reservation_id = p_reservation
         ORDER BY l.line
    LOOP
        v_charge := CASE WHEN v_line.charge = 'start' THEN v_line.settled ELSE v_line.used END;
        -- Of what a success told nothing it is taken to have used what was estimated.
        IF p_kind = 'returned' AND v_line.charge = 'used'
           AND v_line.unit <> ALL (coalesce(v_told, '{}')) THEN
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

    IF v_budgets IS NOT NULL THEN
        PERFORM budget_move(
            p_root, v_budgets, v_windows, v_stripes, v_reserved, v_spent, v_whose, 'settle', p_who,
            NULL);
    END IF;
    IF cardinality(v_lines) = 1 THEN
        UPDATE budget_lines l SET reserved = 0, settled = charged[1]
         WHERE l.root = p_root AND l.reservation_id = p_reservation AND l.line = v_lines[1];
    ELSE
        UPDATE budget_lines l SET reserved = 0, settled = c.charge
          FROM unnest(v_lines, charged) AS c (line, charge)
         WHERE l.root = p_root AND l.reservation_id = p_reservation AND l.line = c.line;
    END IF;
    v_now := CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint);
    UPDATE budget_reservations r
       SET state = 'settled', unmetered = was_unmetered, ended_us = v_now
     WHERE r.root = p_root AND r.reservation_id = p_reservation;
    closed := p_close AND NOT EXISTS (
        SELECT 1 FROM budget_outbox o
         WHERE o.root = p_root AND o.reservation_id = p_reservation
           AND (o.lane IS NOT NULL OR o.order_key IS NOT NULL));
    UPDATE budget_attempts a
       SET ended_us = v_now, outcome = p_kind, error = p_error,
           payload = CASE WHEN NOT closed THEN p_payload END,
           lease_until_us = CASE WHEN NOT closed THEN a.lease_until_us END
     WHERE a.root = p_root AND a.reservation_id = p_reservation AND a.attempt = p_attempt;
    IF closed THEN
        DELETE FROM budget_outbox o WHERE o.root = p_root AND o.reservation_id = p_reservation;
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
