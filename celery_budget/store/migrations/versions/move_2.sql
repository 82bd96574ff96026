-- Moves balances and writes each move into the journal. The one place where that is done on
-- PostgreSQL; celery_budget.store.balances does the same for SQLite.
--
-- The arrays have one element a move; several may be of one balance. Locks the balances in the
-- order (budget, window, stripe); the caller holds the rows of the reservations.
CREATE FUNCTION budget_move(
    p_root text, p_budgets text[], p_windows bigint[], p_stripes smallint[], p_reserved bigint[],
    p_spent bigint[], p_reservations uuid[], p_what text, p_who text, p_reason text
) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    c_most CONSTANT bigint := 9223372036854775807;
    v_noted bigint;
BEGIN
    PERFORM 1
       FROM budget_balances b
       JOIN (SELECT DISTINCT * FROM unnest(p_budgets, p_windows, p_stripes)) AS k
                (budget, window_us, stripe)
         ON b.budget = k.budget AND b.window_us = k.window_us AND b.stripe = k.stripe
      WHERE b.root = p_root
      ORDER BY b.budget COLLATE "C", b.window_us, b.stripe
        FOR UPDATE OF b;
    WITH want AS (
        SELECT w.*, row_number() OVER same AS nth,
               sum(w.reserved) OVER same AS reserved_so_far, sum(w.spent) OVER same AS spent_so_far
          FROM unnest(p_budgets, p_windows, p_stripes, p_reserved, p_spent, p_reservations)
               WITH ORDINALITY
               AS w (budget, window_us, stripe, reserved, spent, reservation_id, n)
        WINDOW same AS (PARTITION BY w.budget, w.window_us, w.stripe ORDER BY w.n)
    ), total AS (
        SELECT budget, window_us, stripe, sum(reserved) AS reserved, sum(spent) AS spent,
               count(*) AS entries
          FROM want
         GROUP BY budget, window_us, stripe
    ), moved AS (
        UPDATE budget_balances b
           SET reserved = b.reserved + t.reserved, spent = b.spent + t.spent,
               entries = b.entries + t.entries
          FROM total t
         WHERE b.root = p_root AND b.budget = t.budget AND b.window_us = t.window_us
           AND b.stripe = t.stripe AND b.reserved + b.spent + t.reserved + t.spent <= c_most
        RETURNING b.budget, b.window_us, b.stripe, b.reserved - t.reserved AS reserved,
                  b.spent - t.spent AS spent, b.entries - t.entries AS entries
    ), noted AS (
        INSERT INTO budget_journal (
            root, budget, window_us, stripe, entry, at_us, what, who, reservation_id,
            reserved, spent, reserved_after, spent_after, reason)
        SELECT p_root, w.budget, w.window_us, w.stripe, m.entries + w.nth,
               CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint), p_what, p_who,
               w.reservation_id, w.reserved, w.spent, m.reserved + w.reserved_so_far,
               m.spent + w.spent_so_far, p_reason
          FROM want w
          JOIN moved m
            ON m.budget = w.budget AND m.window_us = w.window_us AND m.stripe = w.stripe
        RETURNING 1
    )
    SELECT count(*) INTO v_noted FROM noted;
    IF v_noted < cardinality(p_budgets) THEN
        -- Known to celery_budget.store.engine.
        RAISE EXCEPTION USING ERRCODE = 'CB001', MESSAGE = 'budget '
            || array_to_string(p_budgets, ' or ')
            || ' cannot count that far; a balance is at most 2^63-1';
    END IF;
END
$$
