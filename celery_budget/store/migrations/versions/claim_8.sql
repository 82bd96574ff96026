-- A claim in one round trip. Mirrors celery_budget.store.attempts.claim, which serves SQLite and what
-- is left to it here; one contract suite holds both to the same behaviour.
--
-- 'general' is answered, and nothing is changed, where no further attempt may start: the deadline has
-- passed, or p_most attempts or p_within are used up. How such a request ends is decided there.
--
-- Attempts that have ended are closed with one that is claimed, by budget_close: p_closing has their
-- reservations. What is not is returned.
--
-- Locks: the reservation, so that deliveries of one message go one after another; then the balances
-- of lines that are charged at the start, in the order (budget, window, stripe).
CREATE FUNCTION budget_claim(
    p_root text, p_reservation uuid, p_task_id text, p_nesting integer, p_retries integer,
    p_worker text, p_boot uuid, p_pid integer, p_late_ack boolean, p_rerun boolean,
    p_inquires boolean, p_claim uuid, p_lease bigint, p_limited boolean, p_most integer,
    p_within bigint, p_closing uuid[], p_closing_attempts integer[], p_closing_claims uuid[],
    p_who text, p_lock_ms text
) RETURNS TABLE (
    outcome text, attempt integer, elapsed_us bigint, deadline_us bigint, left_us bigint,
    said text, payload text, unclosed uuid[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    -- Of an attempt that waits for a worker to give its outcome again.
    c_nobody CONSTANT uuid := '00000000-0000-0000-0000-000000000000';
    v_row record;
    v_current record;
    v_now bigint;
    v_first boolean;
BEGIN
    PERFORM set_config('lock_timeout', p_lock_ms, true);
    unclosed := p_closing;
    -- At once what was never claimed: it has no attempt. A retry from before the claim may be parked,
    -- and is written with the row: who sees its retries sees that.
    UPDATE budget_reservations r
       SET state = 'running', attempts = 1, deliveries = r.deliveries + 1
     WHERE r.root = p_root AND r.reservation_id = p_reservation
       AND r.task_id = p_task_id AND r.nesting = p_nesting AND r.retries = p_retries
       AND r.state IN ('reserved', 'published') AND r.attempts = 0
       AND (r.retries = 0 OR NOT EXISTS (
            SELECT 1 FROM budget_parked k
             WHERE k.root = p_root AND k.reservation_id = p_reservation))
       AND (r.deadline_us IS NULL
            OR r.deadline_us > CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint))
    RETURNING r.retries, 0 AS attempts, r.deadline_us, r.charges_start, r.lane INTO v_row;
    v_first := FOUND;
    IF NOT v_first THEN
        SELECT r.task_id, r.nesting, r.state, r.retries, r.attempts, r.deadline_us,
               r.charges_start, r.lane
          INTO v_row
          FROM budget_reservations r
         WHERE r.root = p_root AND r.reservation_id = p_reservation
           FOR NO KEY UPDATE;
        IF NOT FOUND OR v_row.task_id <> p_task_id OR v_row.nesting <> p_nesting THEN
            outcome := 'missing';
            RETURN NEXT;
            RETURN;
        END IF;
    END IF;
    v_now := CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint);
    elapsed_us := 0;
    deadline_us := v_row.deadline_us;
    left_us := v_row.deadline_us - v_now;

    IF NOT v_first THEN
        IF p_within IS NOT NULL AND v_row.attempts > 0 THEN
            SELECT greatest(0, v_now - a.started_us) INTO elapsed_us
              FROM budget_attempts a
             WHERE a.root = p_root AND a.reservation_id = p_reservation AND a.attempt = 1;
        END IF;
        SELECT a.attempt, a.claim_id, a.retries, a.boot_id, a.ended_us, a.outcome, a.payload,
               a.lease_until_us
          INTO v_current
          FROM budget_attempts a
         WHERE a.root = p_root AND a.reservation_id = p_reservation
           AND a.attempt = v_row.attempts;
        IF v_current.claim_id = p_claim THEN
            -- Its answer was lost. It is to be on the synchronous standbys before it is told.
            IF current_setting('synchronous_standby_names') <> '' THEN
                PERFORM pg_logical_emit_message(true, 'celery_budget', '');
            END IF;
            attempt := v_current.attempt;
            outcome := CASE WHEN v_current.ended_us IS NULL THEN 'claimed' ELSE 'replay' END;
            said := v_current.outcome;
            payload := v_current.payload;
            RETURN NEXT;
            RETURN;
        END IF;

        IF v_row.state NOT IN ('reserved', 'published', 'waiting') OR v_row.retries <> p_retries
        THEN
            IF v_current.lease_until_us IS NULL OR v_current.retries <> p_retries THEN
                outcome := CASE WHEN v_row.state = 'running' THEN 'running' ELSE 'closed' END;
                said := v_row.state;
                RETURN NEXT;
                RETURN;
            END IF;
            -- It runs, or it is being asked about, or its worker is still busy with what follows;
            -- should that worker be gone, recovery publishes the message again when the lease has
            -- lapsed.
            IF v_current.ended_us IS NULL OR v_current.outcome = 'uncertain'
               OR (v_current.lease_until_us > v_now AND v_current.boot_id <> c_nobody) THEN
                outcome := 'running';
                RETURN NEXT;
                RETURN;
            END IF;
            UPDATE budget_attempts a
               SET claim_id = p_claim, worker = p_worker, boot_id = p_boot, pid = p_pid,
                   lease_until_us = v_now + p_lease, suspected_us = NULL
             WHERE a.root = p_root AND a.reservation_id = p_reservation
               AND a.attempt = v_current.attempt;
            outcome := 'replay';
            attempt := v_current.attempt;
            said := v_current.outcome;
            payload := v_current.payload;
            RETURN NEXT;
            RETURN;
        END IF;

        -- The broker's own redelivery: what it would need is not held yet, or its lane has no room
        -- for it. It is published again when it fits.
        IF EXISTS (
            SELECT 1 FROM budget_parked k
             WHERE k.root = p_root AND k.reservation_id = p_reservation
        ) OR (v_row.attempts > 0 AND EXISTS (
            SELECT 1 FROM budget_outbox o
             WHERE o.root = p_root AND o.reservation_id = p_reservation
               AND o.retries = v_row.retries AND o.state = 'held'
        )) THEN
            outcome := 'closed';
            said := v_row.state;
            RETURN NEXT;
            RETURN;
        END IF;
        IF left_us <= 0 OR (v_current.attempt IS NOT NULL
                            AND (v_row.attempts >= p_most OR elapsed_us > p_within)) THEN
            outcome := 'general';
            RETURN NEXT;
            RETURN;
        END IF;
        IF v_current.payload IS NOT NULL AND (p_limited OR left_us IS NOT NULL) THEN
            UPDATE budget_attempts a SET payload = NULL
             WHERE a.root = p_root AND a.reservation_id = p_reservation
               AND a.attempt = v_current.attempt;
        END IF;
        UPDATE budget_reservations r
           SET state = 'running', attempts = r.attempts + 1, deliveries = r.deliveries + 1
         WHERE r.root = p_root AND r.reservation_id = p_reservation;
    END IF;

    outcome := 'claimed';
    attempt := v_row.attempts + 1;
    INSERT INTO budget_attempts (
        root, reservation_id, attempt, claim_id, retries, worker, boot_id, pid, late_ack, rerun,
        inquires, started_us, lease_until_us, replays, queue, publishes, published_us)
    SELECT p_root, p_reservation, v_row.attempts + 1, p_claim, v_row.retries, p_worker, p_boot,
           p_pid, p_late_ack, p_rerun, p_inquires, v_now, v_now + p_lease, 0,
           o.queue, o.publishes, o.published_us
      FROM (SELECT 1) AS one
      LEFT JOIN budget_outbox o
        ON o.root = p_root AND o.reservation_id = p_reservation AND o.retries = v_row.retries;
    IF v_row.charges_start THEN
        PERFORM budget_charge(p_root, p_reservation, p_who);
    END IF;
    IF v_row.lane IS NOT NULL THEN
        PERFORM budget_wake(p_root);
    END IF;
    IF cardinality(p_closing) > 0 THEN
        unclosed := budget_close(p_root, p_closing, p_closing_attempts, p_closing_claims);
    END IF;
    RETURN NEXT;
END
$$
