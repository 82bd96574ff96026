-- The start of a run in place in one round trip: a request is admitted without a message, and its first
-- attempt is claimed. Mirrors celery_budget.store.in_place.start, which serves SQLite and what is left
-- to it here; one contract suite holds both to the same behaviour.
--
-- 'general' is answered, and nothing is changed, where its deadline has passed, or this very call was
-- made before. Where the deadline passes while it waits for a lock it raises CB002: nothing is changed
-- either.
--
-- Locks: as budget_admit, then as budget_charge.
CREATE FUNCTION budget_start(
    p_root text, p_reservation uuid, p_owner text, p_request text, p_nesting integer,
    p_task_id text, p_task_name text, p_stage text, p_fingerprint text, p_opaque boolean,
    p_estimator text, p_version text, p_prices text, p_parent uuid, p_retries integer,
    p_unreserved boolean, p_finishing boolean, p_budgets text[], p_amounts bigint[], p_charges text[],
    p_deadline bigint, p_within bigint, p_shadows text, p_note boolean, p_worker text, p_boot uuid,
    p_pid integer, p_late_ack boolean, p_rerun boolean, p_inquires boolean, p_claim uuid,
    p_lease bigint, p_who text, p_lock_ms text
) RETURNS TABLE (
    outcome text, reservation_id uuid, task_id text, fingerprint text, budget text, unit text,
    requested bigint, limit_amount bigint, reserved bigint, spent bigint, most bigint,
    left_us bigint, freed bigint, span_us bigint, deadline_us bigint, time_us bigint
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint);
    v_tried record;
BEGIN
    outcome := 'general';
    IF p_deadline <= v_now OR p_within <= 0 THEN
        RETURN NEXT;
        RETURN;
    END IF;
    SELECT * INTO v_tried
      FROM budget_admit(
        p_root, p_reservation, p_owner, p_request, p_nesting, p_task_id, p_task_name, p_stage,
        p_fingerprint, p_opaque, p_estimator, p_version, p_prices, p_parent, p_retries, p_unreserved,
        p_finishing, p_budgets, p_amounts, p_charges, NULL, 'running', 0, 0, NULL, NULL, NULL, NULL,
        0, NULL, NULL, p_deadline, p_within, p_shadows, NULL, NULL, NULL, false, p_note, p_who,
        p_lock_ms);
    IF v_tried.outcome = 'existing' AND v_tried.reservation_id = p_reservation THEN
        RETURN NEXT;
        RETURN;
    END IF;
    outcome := v_tried.outcome;
    reservation_id := v_tried.reservation_id;
    task_id := v_tried.task_id;
    fingerprint := v_tried.fingerprint;
    budget := v_tried.budget;
    unit := v_tried.unit;
    requested := v_tried.requested;
    limit_amount := v_tried.limit_amount;
    reserved := v_tried.reserved;
    spent := v_tried.spent;
    most := v_tried.most;
    left_us := v_tried.left_us;
    freed := v_tried.freed;
    span_us := v_tried.span_us;
    IF outcome <> 'reserved' THEN
        RETURN NEXT;
        RETURN;
    END IF;
    v_now := CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint);
    IF p_deadline IS NOT NULL OR p_within IS NOT NULL THEN
        SELECT r.deadline_us, r.deadline_us - v_now
          INTO deadline_us, time_us
          FROM budget_reservations r
         WHERE r.root = p_root AND r.reservation_id = p_reservation;
        IF time_us <= 0 THEN
            -- Known to celery_budget.store.in_place.
            RAISE EXCEPTION USING
                ERRCODE = 'CB002', MESSAGE = 'the deadline has passed meanwhile';
        END IF;
    END IF;
    INSERT INTO budget_attempts (
        root, reservation_id, attempt, claim_id, retries, worker, boot_id, pid, late_ack, rerun,
        inquires, started_us, lease_until_us, replays)
    VALUES (
        p_root, p_reservation, 1, p_claim, p_retries, p_worker, p_boot, p_pid, p_late_ack, p_rerun,
        p_inquires, v_now, v_now + p_lease, 0);
    IF 'start' = ANY (p_charges) THEN
        PERFORM budget_charge(p_root, p_reservation, p_who);
    END IF;
    RETURN NEXT;
END
$$
