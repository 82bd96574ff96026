-- Admission in one round trip. The commonest is said here in three statements: one budget with a limit
-- of its own, in one row or spread over several, for a message that is to be published as soon as may
-- be; the row, or of several the one it begins with, has room. Whatever else there is to see to,
-- budget_admit does; where that has changed behind the lock, with the next call.
--
-- Locks, as budget_admit: the new reservation's key, then the balance, or where that is locked by
-- another and one of several, the next that has room. Neither where by the first look there is more to
-- see to.
--
-- What counts is how many statements and expressions run here: each costs more to begin than to run.
CREATE FUNCTION budget_reserve(
    p_root text, p_reservation uuid, p_owner text, p_request text, p_nesting integer,
    p_task_id text, p_task_name text, p_stage text, p_fingerprint text, p_opaque boolean,
    p_estimator text, p_version text, p_prices text, p_parent uuid, p_retries integer,
    p_unreserved boolean, p_finishing boolean, p_budgets text[], p_amounts bigint[], p_charges text[],
    p_outbox uuid, p_state text, p_again bigint, p_due bigint, p_expires bigint, p_queue text,
    p_body bytea, p_envelope text, p_rank integer, p_order_key text, p_broker text,
    p_deadline bigint, p_within bigint, p_shadows text, p_tenant text, p_weight bigint,
    p_bound bigint, p_queues boolean, p_note boolean, p_who text, p_lock_ms text,
    p_lent boolean DEFAULT false
) RETURNS TABLE (
    outcome text, reservation_id uuid, task_id text, fingerprint text, budget text, unit text,
    requested bigint, limit_amount bigint, reserved bigint, spent bigint, most bigint,
    left_us bigint, freed bigint, span_us bigint
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_now bigint;
    v_window bigint;
    v_stripe smallint;
    v_asleep boolean;
    -- Which stripe of a budget it begins with.
    v_pick integer := get_byte(uuid_send(p_reservation), 15);
BEGIN
    -- One of eight notes whether it had to wait.
    IF p_order_key IS NULL AND p_state = 'due' AND cardinality(p_budgets) = 1
       AND p_amounts[1] > 0 AND v_pick & 7 > 0
       AND set_config('lock_timeout', p_lock_ms, true) IS NOT NULL
    THEN
        v_now := CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint);
        WITH look AS (
            SELECT w.window_us, w.stripe
              FROM budget_budgets b
              JOIN LATERAL (
                  SELECT c.window_us, c.stripe, c.end_us, c.reserved, c.spent, c.share, c.basis
                    FROM budget_balances c
                   WHERE c.root = p_root AND c.budget = p_budgets[1] AND c.window_us <= v_now
                     AND c.stripe = mod(v_pick, b.spread)
                   ORDER BY c.window_us DESC
                   LIMIT 1
              ) w ON w.end_us > v_now
             WHERE b.root = p_root AND b.name = p_budgets[1] AND b.state = 'open'
               AND b.parent IS NULL AND b.limit_share IS NULL AND b.limit_amount > 0
               AND CASE
                       -- What it was spread over before may hold something still.
                       WHEN w.share IS NOT NULL
                       THEN w.basis = div(b.limit_amount::numeric * b.soft_stop, 1000000)
                            AND w.reserved + w.spent <= w.share - p_amounts[1]
                       ELSE b.spread = 1
                            AND w.reserved + w.spent <= div(
                                b.limit_amount::numeric
                                * CASE WHEN p_finishing THEN b.hard_stop ELSE b.soft_stop END,
                                1000000) - p_amounts[1]
                   END
               AND NOT EXISTS (SELECT 1 FROM budget_grants g
                                WHERE g.root = p_root AND g.budget = p_budgets[1]
                                  AND g.until_us > v_now)
               AND NOT EXISTS (SELECT 1 FROM budget_parked p WHERE p.root = p_root)
               AND NOT EXISTS (SELECT 1 FROM budget_lane_queues q
                                WHERE q.root = p_root AND q.queue = p_queue)
               AND (p_bound IS NULL
                    OR EXISTS (SELECT 1 FROM budget_backlog k
                                WHERE k.root = p_root AND k.counted_us > v_now - 2000000
                                  AND k.messages < p_bound))
        ), made AS (
            INSERT INTO budget_reservations (
                root, reservation_id, owner, request_id, nesting, task_id, task_name, stage,
                fingerprint, opaque, estimator, estimator_version, prices, parent_id, state,
                retries, attempts, deliveries, unreserved, unmetered, over, created_us,
                charges_start, deadline_us, shadows, due_us)
            SELECT p_root, p_reservation, p_owner, p_request, p_nesting, p_task_id, p_task_name,
                   p_stage, p_fingerprint, p_opaque, p_estimator, p_version, p_prices, p_parent,
                   'reserved', p_retries, 0, 0, p_unreserved, false, false, v_now,
                   p_charges[1] = 'start', least(p_deadline, v_now + p_within), p_shadows,
                   nullif(p_due, 0)
              FROM look
            ON CONFLICT DO NOTHING
            RETURNING true
        )
        SELECT l.window_us, l.stripe INTO v_window, v_stripe FROM look l, made;
        IF FOUND THEN
            PERFORM 1
               FROM budget_balances c
              WHERE c.root = p_root AND c.budget = p_budgets[1] AND c.window_us = v_window
                AND c.stripe = v_stripe
                FOR UPDATE SKIP LOCKED;
            IF NOT FOUND THEN
                v_stripe := (budget_take(p_root, p_budgets, ARRAY[v_window], ARRAY[v_stripe],
                                         p_amounts, false))[1];
            END IF;
            -- A new look, behind the lock: this one decides.
            WITH moved AS (
                UPDATE budget_balances c
                   SET reserved = c.reserved + p_amounts[1], entries = c.entries + 1
                  FROM budget_budgets b
                 WHERE c.root = p_root AND c.budget = p_budgets[1] AND c.window_us = v_window
                   AND c.stripe = v_stripe
                   AND b.root = p_root AND b.name = p_budgets[1] AND b.state = 'open'
                   AND b.parent IS NULL AND b.limit_share IS NULL AND b.limit_amount > 0
                   AND CASE
                           WHEN c.share IS NOT NULL
                           THEN c.basis = div(b.limit_amount::numeric * b.soft_stop, 1000000)
                                AND c.reserved + c.spent <= c.share - p_amounts[1]
                           ELSE c.reserved + c.spent <= div(
                                b.limit_amount::numeric
                                * CASE WHEN p_finishing THEN b.hard_stop ELSE b.soft_stop END,
                                1000000) - p_amounts[1]
                       END
                RETURNING c.reserved, c.spent, c.entries, b.unit
            ), entry AS (
                INSERT INTO budget_journal (
                    root, budget, window_us, stripe, entry, at_us, what, who, reservation_id,
                    reserved, spent, reserved_after, spent_after)
                SELECT p_root, p_budgets[1], v_window, v_stripe, m.entries,
                       CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint), 'reserve',
                       p_who, p_reservation, p_amounts[1], 0, m.reserved, m.spent
                  FROM moved m
            ), line AS (
                INSERT INTO budget_lines (
                    root, reservation_id, line, budget, window_us, stripe, charge, unit,
                    estimate, reserved, used, settled)
                SELECT p_root, p_reservation, 0, p_budgets[1], v_window, v_stripe, p_charges[1], m.unit,
                       p_amounts[1], p_amounts[1], 0, 0
                  FROM moved m
            ), message AS (
                INSERT INTO budget_outbox (
                    root, outbox_id, reservation_id, task_id, task_name, retries, state, due_us,
                    expires_us, publishes, failures, created_us, queue, body, envelope, rank, broker,
                    tenant, weight)
                SELECT p_root, p_outbox, p_reservation, p_task_id, p_task_name, p_retries, 'due',
                       CASE WHEN p_due = 0 THEN v_now ELSE p_due END,
                       least(p_expires, p_deadline, v_now + p_within), 0, 0, v_now, p_queue, p_body,
                       p_envelope, p_rank, p_broker, p_tenant, p_weight
                  FROM moved m
            )
            SELECT p_due <= v_now AND EXISTS (
                       SELECT 1 FROM budget_relays r WHERE r.root = p_root AND r.sleeping)
              INTO v_asleep
              FROM moved m;
            IF FOUND THEN
                IF v_asleep THEN
                    PERFORM budget_wake(p_root, p_lent);
                END IF;
                outcome := 'reserved';
                reservation_id := p_reservation;
                task_id := p_task_id;
                fingerprint := p_fingerprint;
                RETURN NEXT;
                RETURN;
            END IF;
            DELETE FROM budget_reservations r
             WHERE r.root = p_root AND r.reservation_id = p_reservation;
            -- What else is to be locked now may come before what is locked already: the caller gives
            -- that back and calls again.
            outcome := 'moved';
            budget := p_budgets[1];
            RETURN NEXT;
            RETURN;
        END IF;
    END IF;
    RETURN QUERY
        SELECT * FROM budget_admit(
            p_root, p_reservation, p_owner, p_request, p_nesting, p_task_id, p_task_name, p_stage,
            p_fingerprint, p_opaque, p_estimator, p_version, p_prices, p_parent, p_retries,
            p_unreserved, p_finishing, p_budgets, p_amounts, p_charges, p_outbox, p_state, p_again,
            p_due, p_expires, p_queue, p_body, p_envelope, p_rank, p_order_key, p_broker,
            p_deadline, p_within, p_shadows, p_tenant, p_weight, p_bound, p_queues, p_note, p_who,
            p_lock_ms, p_lent);
END
$$
