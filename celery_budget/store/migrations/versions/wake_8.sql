-- Tells relays that sleep of a message that is due; for those that do not, one look and no more.
--
-- A NOTIFY takes one lock for the whole server at commit, so that one in each admission would put
-- them all in a row. So who tells a relay takes its word back, and of all that commit while it
-- sleeps one notifies; the others pass its row by and wait for nothing. They may commit before that
-- one does, or after: the relay looks when it is told, and before it sleeps again. Should that one
-- not commit at all, relays find what is due by looking.
--
-- A transaction that is lent to us takes no word back: it may be long until it commits, if it does,
-- and a row that was changed meanwhile would fail it above READ COMMITTED.
--
-- A relay that died asleep is not believed for long. With a queue of notifications that is filling up
-- a NOTIFY would fail the transaction at commit: then relays find it by looking.
CREATE FUNCTION budget_wake(p_root text, p_lent boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_since bigint := CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint) - 10000000;
BEGIN
    IF NOT EXISTS (
        SELECT 1 FROM budget_relays r
         WHERE r.root = p_root AND r.sleeping AND r.seen_us > v_since
    ) OR pg_notification_queue_usage() >= 0.5 THEN
        RETURN;
    END IF;
    IF NOT p_lent THEN
        WITH asleep AS (
            SELECT r.relay_id FROM budget_relays r
             WHERE r.root = p_root AND r.sleeping AND r.seen_us > v_since
               FOR NO KEY UPDATE SKIP LOCKED
        )
        UPDATE budget_relays r SET sleeping = false
          FROM asleep a
         WHERE r.root = p_root AND r.relay_id = a.relay_id;
        IF NOT FOUND THEN
            RETURN;
        END IF;
    END IF;
    PERFORM pg_notify('budget_' || md5(p_root), '');
END
$$
