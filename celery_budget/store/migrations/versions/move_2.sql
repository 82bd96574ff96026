-- Moves balances and writes each move into the journal. The one place where that is done on
-- PostgreSQL; celery_budget.store.balances does the same for SQLite.
--
-- The arrays have one element a move; several may be of one balance. Locks the balances in the
-- order (budget, window, stripe); the caller holds the rows of the reservations.
CREATE FUNCTION budget_move(
    p_root text, p_budgets text[], p_windows bigint[], p_stripes smallint[], p_reserved bigint[],
    p_spent bigint[], p_reservations uuid[], p_what text, p_who text, p_reason text
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    c_most CONSTANT numeric := 9223372036854775807;
    v record;
BEGIN
    IF cardinality(p_budgets) > 1 THEN
        PERFORM 1
           FROM budget_balances b
           JOIN (SELECT DISTINCT * FROM unnest(p_budgets, p_windows, p_stripes)) AS k
                    (budget, window_us, stripe)
             ON b.budget = k.budget AND b.window_us = k.window_us AND b.stripe = k.stripe
          WHERE b.root = p_root
          ORDER BY b.budget COLLATE "C", b.window_us, b.stripe
            FOR UPDATE OF b;
    END IF;
    FOR i IN 1 .. cardinality(p_budgets) LOOP
        UPDATE budget_balances b
           SET reserved = b.reserved + p_reserved[i], spent = b.spent + p_spent[i],
               entries = b.entries + 1
         WHERE b.root = p_root AND b.budget = p_budgets[i] AND b.window_us = p_windows[i]
           AND b.stripe = p_stripes[i]
           AND b.reserved::numeric + b.spent + p_reserved[i] + p_spent[i] <= c_most
        RETURNING b.reserved, b.spent, b.entries INTO v;
        IF NOT FOUND THEN
            -- Known to celery_budget.store.engine.
            RAISE EXCEPTION USING ERRCODE = 'CB001', MESSAGE = 'budget ' || p_budgets[i]
                || ' cannot count that far; a balance is at most 2^63-1';
        END IF;
        INSERT INTO budget_journal (
            root, budget, window_us, stripe, entry, at_us, what, who, reservation_id,
            reserved, spent, reserved_after, spent_after, reason)
        VALUES (
            p_root, p_budgets[i], p_windows[i], p_stripes[i], v.entries,
            CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint), p_what, p_who,
            p_reservations[i], p_reserved[i], p_spent[i], v.reserved, v.spent, p_reason);
    END LOOP;
END
$$
