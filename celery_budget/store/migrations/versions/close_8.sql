-- Closes attempts that have ended, several at a time. Mirrors celery_budget.store.attempts.close.
--
-- Returned are the reservations of those that are left to it: what others have locked just now, so
-- that nobody is waited for; what follows a message by its key, or its lane is to hear of; what has a
-- plan. What is closed already, or whose fence is gone, is none of them.
--
-- Locks the reservations, and their messages; skips what is locked. So it may follow in the
-- transaction of another reservation, whose lock is held.
CREATE FUNCTION budget_close(
    p_root text, p_reservations uuid[], p_attempts integer[], p_claims uuid[]
) RETURNS uuid[] LANGUAGE plpgsql AS $$
DECLARE
    v_row record;
    v_left uuid[] := '{}';
BEGIN
    FOR i IN 1 .. cardinality(p_reservations) LOOP
        SELECT r.ended_us, r.plan_id INTO v_row
          FROM budget_reservations r
         WHERE r.root = p_root AND r.reservation_id = p_reservations[i]
           FOR NO KEY UPDATE SKIP LOCKED;
        IF NOT FOUND OR v_row.plan_id IS NOT NULL OR EXISTS (
            SELECT 1 FROM budget_outbox o
             WHERE o.root = p_root AND o.reservation_id = p_reservations[i]
               AND (o.lane IS NOT NULL OR o.order_key IS NOT NULL)
        ) THEN
            v_left := v_left || p_reservations[i];
            CONTINUE;
        END IF;
        UPDATE budget_attempts a SET lease_until_us = NULL, payload = NULL
         WHERE a.root = p_root AND a.reservation_id = p_reservations[i]
           AND a.attempt = p_attempts[i] AND a.claim_id = p_claims[i]
           AND a.ended_us IS NOT NULL AND a.lease_until_us IS NOT NULL;
        IF FOUND AND v_row.ended_us IS NOT NULL THEN
            DELETE FROM budget_outbox o
             WHERE o.root = p_root AND o.reservation_id = p_reservations[i];
        END IF;
    END LOOP;
    RETURN v_left;
END
$$
