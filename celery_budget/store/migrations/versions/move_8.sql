-- Moves balances and writes each move into the journal. The one place where that is done on
-- PostgreSQL; celery_budget.store.balances does the same for SQLite.
--
-- The arrays have one element a move; several may be of one balance. Locks the balances in the
-- order (budget, window, stripe), but for an admission, which has; the caller holds the rows of the
-- reservations. A stripe that grows
-- beyond its share takes that from the others, behind the locks of all, before they admit again.
CREATE FUNCTION budget_move(
    p_root text, p_budgets text[], p_windows bigint[], p_stripes smallint[], p_reserved bigint[],
    p_spent bigint[], p_reservations uuid[], p_what text, p_who text, p_reason text
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    c_most CONSTANT numeric := 9223372036854775807;
    v record;
    v_found boolean;
    v_total numeric;
BEGIN
    -- An admission holds what it draws on, with room for it.
    IF p_what <> 'reserve' THEN
        IF EXISTS (
            SELECT 1
              FROM unnest(p_budgets, p_windows, p_stripes, p_reserved, p_spent)
                   AS k (budget, window_us, stripe, reserved, spent)
              JOIN budget_balances b
                ON b.budget = k.budget AND b.window_us = k.window_us AND b.stripe = k.stripe
             WHERE b.root = p_root AND k.reserved > -k.spent AND b.share IS NOT NULL
        ) THEN
            BEGIN
                IF NOT budget_hold(p_root, p_budgets, p_windows, p_stripes,
                                   (SELECT array_agg(k.reserved::numeric + k.spent ORDER BY k.n)
                                      FROM unnest(p_reserved, p_spent)
                                           WITH ORDINALITY AS k (reserved, spent, n)), true)
                THEN
                    RAISE EXCEPTION USING ERRCODE = 'CB003';
                END IF;
            EXCEPTION WHEN SQLSTATE 'CB003' THEN
                -- What was locked has been given back: all of them come before a single one.
                FOR v IN
                    SELECT k.budget, k.window_us
                      FROM unnest(p_budgets, p_windows) AS k (budget, window_us)
                     GROUP BY k.budget, k.window_us
                     ORDER BY k.budget COLLATE "C", k.window_us
                LOOP
                    PERFORM budget_whole(p_root, v.budget, v.window_us);
                END LOOP;
            END;
        ELSIF cardinality(p_budgets) > 1 THEN
            PERFORM 1
               FROM budget_balances b
               JOIN (SELECT DISTINCT * FROM unnest(p_budgets, p_windows, p_stripes)) AS k
                        (budget, window_us, stripe)
                 ON b.budget = k.budget AND b.window_us = k.window_us AND b.stripe = k.stripe
              WHERE b.root = p_root
              ORDER BY b.budget COLLATE "C", b.window_us, b.stripe
                FOR UPDATE OF b;
        END IF;
    END IF;
    FOR i IN 1 .. cardinality(p_budgets) LOOP
        UPDATE budget_balances b
           SET reserved = b.reserved + p_reserved[i], spent = b.spent + p_spent[i],
               entries = b.entries + 1
         WHERE b.root = p_root AND b.budget = p_budgets[i] AND b.window_us = p_windows[i]
           AND b.stripe = p_stripes[i]
           AND b.reserved::numeric + b.spent + p_reserved[i] + p_spent[i]
               <= CASE WHEN b.share IS NOT NULL AND p_reserved[i] > -p_spent[i]
                       THEN CASE WHEN b.basis >= 0 THEN b.share ELSE -1 END
                       ELSE c_most END
        RETURNING b.reserved, b.spent, b.entries INTO v;
        IF NOT FOUND THEN
            -- Of one row it would be too much; of several it is beyond its share, and all are held.
            -- An update that finds so after a wait keeps its lock: it would be the wrong one to
            -- begin with.
            PERFORM budget_whole(p_root, p_budgets[i], p_windows[i]);
            UPDATE budget_balances b
               SET reserved = b.reserved + p_reserved[i], spent = b.spent + p_spent[i],
                   entries = b.entries + 1
             WHERE b.root = p_root AND b.budget = p_budgets[i] AND b.window_us = p_windows[i]
               AND b.stripe = p_stripes[i]
               AND b.reserved::numeric + b.spent + p_reserved[i] + p_spent[i] <= c_most
            RETURNING b.reserved, b.spent, b.entries, b.basis INTO v;
            v_found := FOUND;
            SELECT sum(b.reserved) + sum(b.spent) INTO v_total FROM budget_balances b
             WHERE b.root = p_root AND b.budget = p_budgets[i] AND b.window_us = p_windows[i];
            IF NOT v_found OR v_total > c_most THEN
                -- Known to celery_budget.store.engine.
                RAISE EXCEPTION USING ERRCODE = 'CB001', MESSAGE = 'budget ' || p_budgets[i]
                    || ' cannot count that far; a balance is at most 2^63-1';
            END IF;
            IF v.basis >= 0 THEN
                PERFORM budget_allot(p_root, p_budgets[i], p_windows[i], p_stripes[i], 0, 0, v.basis);
            END IF;
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
