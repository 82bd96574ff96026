-- Notes that the broker has confirmed the messages of a window; returns how many of them were still
-- the batch's, and the order keys of those, for what follows by them. Those that another relay has
-- taken since are left alone. Only `reserved` becomes `published`: a worker may have been faster. A
-- message that starts nothing in the ledger and is no attempt's successor is done with and goes.
--
-- p_held: the reservations of the messages. p_again_us: how long until a message that was never
-- started is looked at again, for the first time; doubled with each time it is published.
--
-- Locks the reservations by id, beside effects, then the messages by id.
CREATE FUNCTION budget_mark_published(
    p_root text, p_fence uuid, p_ids uuid[], p_held uuid[], p_again_us bigint,
    OUT marked integer, OUT order_keys text[]
) LANGUAGE plpgsql AS $$
DECLARE
    v_now bigint;
    v_started uuid[];
    v_done uuid[];
    v_kept uuid[];
BEGIN
    PERFORM 1 FROM budget_reservations r
      WHERE r.root = p_root AND r.reservation_id = ANY(p_held)
      ORDER BY r.reservation_id FOR NO KEY UPDATE;
    SELECT count(*),
           array_agg(t.order_key) FILTER (WHERE t.order_key IS NOT NULL),
           array_agg(t.reservation_id) FILTER (WHERE t.reservation_id IS NOT NULL),
           array_agg(t.outbox_id) FILTER (WHERE t.reservation_id IS NULL AND t.parent_id IS NULL),
           array_agg(t.outbox_id)
               FILTER (WHERE t.reservation_id IS NOT NULL OR t.parent_id IS NOT NULL)
      INTO marked, order_keys, v_started, v_done, v_kept
      FROM (
        SELECT o.outbox_id, o.reservation_id, o.parent_id, o.order_key FROM budget_outbox o
         WHERE o.root = p_root AND o.outbox_id = ANY(p_ids)
           AND o.taken_by = p_fence AND o.state = 'due'
         ORDER BY o.outbox_id FOR UPDATE
      ) AS t;
    IF v_started IS NOT NULL THEN
        UPDATE budget_reservations r SET state = 'published'
         WHERE r.root = p_root AND r.reservation_id = ANY(v_started) AND r.state = 'reserved';
    END IF;
    IF v_done IS NOT NULL THEN
        DELETE FROM budget_outbox o WHERE o.root = p_root AND o.outbox_id = ANY(v_done);
    END IF;
    IF v_kept IS NOT NULL THEN
        v_now := CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint);
        -- Another relay may have passed one by before it was marked.
        UPDATE budget_outbox o
           SET state = 'published', publishes = o.publishes + 1, published_us = v_now,
               due_us = v_now + (p_again_us << least(o.publishes, 12)),
               last_error = NULL, taken_by = NULL, behind = false
         WHERE o.root = p_root AND o.outbox_id = ANY(v_kept);
    END IF;
END
$$
