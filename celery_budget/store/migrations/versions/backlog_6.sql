-- How many messages wait to be published, those that a lane holds back among them, as far as it is known: one admission in two seconds counts
-- them, up to one more than the bound, and the others read what it found. NULL: nobody has counted.
--
-- Locks the root's row of the count, only to count, and never waits for it.
CREATE FUNCTION budget_backlog(p_root text, p_bound bigint, p_now bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_messages bigint;
    v_counted bigint;
BEGIN
    SELECT b.messages, b.counted_us INTO v_messages, v_counted
      FROM budget_backlog b WHERE b.root = p_root;
    IF NOT FOUND OR v_counted > p_now - 2000000 THEN
        RETURN v_messages;
    END IF;
    PERFORM 1 FROM budget_backlog b
      WHERE b.root = p_root AND b.counted_us = v_counted FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        SELECT count(*) INTO v_messages FROM (
            SELECT 1 FROM budget_outbox o
             WHERE o.root = p_root AND o.state IN ('due', 'held') LIMIT p_bound + 1
        ) AS waiting;
        UPDATE budget_backlog b SET messages = v_messages, counted_us = p_now
         WHERE b.root = p_root;
    END IF;
    RETURN v_messages;
END
$$
