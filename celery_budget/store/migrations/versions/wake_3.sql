-- Tells a relay that sleeps of a message that is due; for those that do not, one look and no more.
--
-- A NOTIFY takes one lock for the whole server at commit, so that one in each admission would put
-- them all in a row. Nothing is locked and nothing is written here: the relay itself takes its word
-- back when it wakes. One that died asleep is not believed for long. With a queue of notifications
-- that is filling up a NOTIFY would fail the transaction at commit: then relays find it by looking.
CREATE FUNCTION budget_wake(p_root text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (
        SELECT 1 FROM budget_relays r
         WHERE r.root = p_root AND r.sleeping
           AND r.seen_us > CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint) - 10000000
    ) AND pg_notification_queue_usage() < 0.5 THEN
        PERFORM pg_notify('budget_' || md5(p_root), '');
    END IF;
END
$$
