-- Admission in one round trip. Mirrors celery_budget.store.requests for SQLite; one contract suite
-- holds both to the same behaviour.
--
-- Locks: the new reservation's key, then the balances in the order (budget, window, stripe).
-- Two calls with one request key: the second waits for the first to commit, then finds it.
-- A refusal takes no lock unless the balance was used up between the first look and the lock.
CREATE FUNCTION budget_reserve(
    p_root text, p_reservation uuid, p_owner text, p_request text, p_nesting integer,
    p_task_id text, p_task_name text, p_stage text, p_fingerprint text, p_opaque boolean,
    p_estimator text, p_version text, p_parent uuid, p_retries integer, p_unreserved boolean,
    p_budgets text[], p_amounts bigint[], p_charges text[],
    p_outbox uuid, p_state text, p_again bigint, p_due bigint, p_expires bigint, p_queue text,
    p_body bytea, p_envelope text, p_note boolean, p_lock_ms text
) RETURNS TABLE (
    outcome text, reservation_id uuid, task_id text, fingerprint text,
    budget text, unit text, requested bigint, limit_amount bigint, reserved bigint, spent bigint
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    c_most CONSTANT bigint := 9223372036854775807;
    v_now bigint := CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint);
    v_look record;
    v_inserted boolean := false;
BEGIN
    PERFORM set_config('lock_timeout', p_lock_ms, true);
    LOOP
        -- One snapshot for both questions: is it admitted already, and would it fit?
        SELECT e.reservation_id AS existing, e.task_id, e.fingerprint, s.*
          INTO v_look
          FROM (SELECT 1) AS one
          LEFT JOIN LATERAL (
              SELECT r.reservation_id, r.task_id, r.fingerprint
                FROM budget_reservations r
               WHERE r.root = p_root AND r.owner = p_owner AND r.request_id = p_request
                 AND r.nesting = p_nesting AND r.state <> 'released'
          ) e ON true
          LEFT JOIN LATERAL budget_short(p_root, p_budgets, p_amounts) s ON true;
        IF v_look.existing IS NOT NULL THEN
            RETURN QUERY SELECT 'existing', v_look.existing, v_look.task_id, v_look.fingerprint,
                NULL::text, NULL::text, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint;
            RETURN;
        END IF;
        EXIT WHEN v_look.budget IS NOT NULL OR v_inserted;
        INSERT INTO budget_reservations (
            root, reservation_id, owner, request_id, nesting, task_id, task_name, stage,
            fingerprint, opaque, estimator, estimator_version, parent_id, state, retries,
            attempts, deliveries, unreserved, unmetered, over, created_us)
        VALUES (
            p_root, p_reservation, p_owner, p_request, p_nesting, p_task_id, p_task_name, p_stage,
            p_fingerprint, p_opaque, p_estimator, p_version, p_parent,
            CASE p_state WHEN 'published' THEN 'published' ELSE 'reserved' END,
            p_retries, 0, 0, p_unreserved, false, false, v_now)
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            v_inserted := true;
            EXIT;
        END IF;
        -- A repeat of this very call, after a lost connection, may find even what has been
        -- released since. Otherwise somebody else admitted the same request: look again.
        RETURN QUERY SELECT 'existing', r.reservation_id, r.task_id, r.fingerprint,
            NULL::text, NULL::text, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint
           FROM budget_reservations r
          WHERE r.root = p_root AND r.reservation_id = p_reservation;
        IF FOUND THEN
            RETURN;
        END IF;
    END LOOP;

    IF v_inserted THEN
        PERFORM 1
           FROM budget_balances b
          WHERE b.root = p_root AND b.budget = ANY (p_budgets) AND b.window_us = 0 AND b.stripe = 0
          ORDER BY b.budget COLLATE "C", b.window_us, b.stripe
            FOR UPDATE;
        -- A new snapshot, behind the locks: this one decides.
        SELECT s.* INTO v_look FROM (SELECT 1) AS one
          LEFT JOIN LATERAL budget_short(p_root, p_budgets, p_amounts) s ON true;
        IF v_look.budget IS NOT NULL THEN
            DELETE FROM budget_reservations r
             WHERE r.root = p_root AND r.reservation_id = p_reservation;
        END IF;
    END IF;

    IF v_look.budget IS NOT NULL THEN
        IF v_look.unit IS NOT NULL AND p_note THEN
            INSERT INTO budget_refusals (
                root, refusal_id, budget, stage, task_name, requested, refused_us)
            VALUES (p_root, p_reservation, v_look.budget, p_stage, p_task_name,
                v_look.requested, v_now)
            ON CONFLICT DO NOTHING;
        END IF;
        RETURN QUERY SELECT
            CASE WHEN v_look.unit IS NULL THEN 'unknown' ELSE 'refused' END,
            NULL::uuid, NULL::text, NULL::text, v_look.budget, v_look.unit, v_look.requested,
            v_look.limit_amount, v_look.reserved, v_look.spent;
        RETURN;
    END IF;

    UPDATE budget_balances b
       SET reserved = b.reserved + l.amount
      FROM unnest(p_budgets, p_amounts) AS l (budget, amount)
     WHERE b.root = p_root AND b.budget = l.budget AND b.window_us = 0 AND b.stripe = 0;
    INSERT INTO budget_lines (
        root, reservation_id, line, budget, window_us, stripe, charge,
        estimate, reserved, used, settled)
    SELECT p_root, p_reservation, l.line - 1, l.budget, 0, 0, l.charge, l.amount, l.amount, 0, 0
      FROM unnest(p_budgets, p_amounts, p_charges)
           WITH ORDINALITY AS l (budget, amount, charge, line);
    INSERT INTO budget_outbox (
        root, outbox_id, reservation_id, parent_id, task_id, task_name, retries, state, due_us,
        expires_us, publishes, failures, created_us, published_us, queue, body, envelope)
    VALUES (
        p_root, p_outbox, p_reservation, NULL, p_task_id, p_task_name, p_retries, p_state,
        CASE WHEN p_state = 'published' THEN v_now + p_again WHEN p_due = 0 THEN v_now ELSE p_due END,
        p_expires,
        CASE p_state WHEN 'published' THEN 1 ELSE 0 END, 0, v_now,
        CASE p_state WHEN 'published' THEN v_now END, p_queue, p_body, p_envelope);
    RETURN QUERY SELECT 'reserved', p_reservation, p_task_id, p_fingerprint,
        NULL::text, NULL::text, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint;
END
$$
