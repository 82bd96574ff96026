-- How many messages wait to be published, those that a lane holds back among them, as far as it is
-- known: one admission in two seconds counts them, up to one more than the bound, and the others read
-- what it found. NULL: they are to be counted in a transaction of its own. Mirrors
-- celery_budget.store.backlog.
--
-- Locks the root's row of the count, only to count, and never waits for it. A transaction that is lent
-- to us leaves it alone, as it may be long, and nobody else could count meanwhile: up to ten thousand
-- are counted each time there.
CREATE FUNCTION budget_backlog(
    p_root text, p_bound bigint, p_now bigint, p_lent boolean DEFAULT false
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    c_few CONSTANT bigint := least(p_bound, 10000);
    v_messages bigint;
    v_counted bigint;
BEGIN
    SELECT b.messages, b.counted_us INTO v_messages, v_counted
      FROM budget_backlog b WHERE b.root = p_root;
    IF NOT FOUND OR v_counted > p_now - 2000000 THEN
        RETURN v_messages;
    END IF;
    IF p_lent THEN
        SELECT count(*) INTO v_messages FROM (
            SELECT 1 FROM budget_outbox o
             WHERE o.root = p_root AND o.state IN ('due', 'held') LIMIT c_few + 1
        ) AS waiting;
        IF v_messages <= c_few OR c_few = p_bound THEN
            RETURN v_messages;
        ELSIF current_setting('transaction_isolation') = 'read committed' THEN
            RETURN NULL;
        END IF;
        -- It would not see what another transaction has counted.
        RETURN (SELECT count(*) FROM (
            SELECT 1 FROM budget_outbox o
             WHERE o.root = p_root AND o.state IN ('due', 'held') LIMIT p_bound + 1
        ) AS waiting);
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
