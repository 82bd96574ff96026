-- What a request draws on, and whether it fits. Mirrors celery_budget.core.draws; one contract
-- suite holds both to the same behaviour. Each look is of one moment; no locks.
--
-- verdict: NULL where it fits; unknown: there is no such budget; window: the window that is open at
-- p_now has no row yet; mixed: one budget by two rules; otherwise the reason it is refused for.
CREATE FUNCTION budget_decide(
    p_root text, p_budgets text[], p_amounts bigint[], p_charges text[], p_finishing boolean,
    p_now bigint,
    OUT verdict text, OUT budget text, OUT unit text, OUT requested bigint,
    OUT limit_amount bigint, OUT most bigint, OUT reserved bigint, OUT spent bigint,
    OUT d_budgets text[], OUT d_units text[], OUT d_windows bigint[], OUT d_amounts bigint[],
    OUT d_charges text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    c_most CONSTANT bigint := 9223372036854775807;
    v record;
    v_line bigint := 0;
    v_before integer;
    v_short_line bigint;
    v_above numeric;
    v_limit numeric;
    v_blocked boolean;
    v_bound bigint;
    v_at integer;
    v_reason text;
    v_unopened text;
BEGIN
    d_budgets := '{}';
    d_units := '{}';
    d_windows := '{}';
    d_amounts := '{}';
    d_charges := '{}';
    FOR v IN
        WITH RECURSIVE up AS (
            SELECT l.line, 0 AS depth, l.budget AS name, l.amount, l.charge, b.name AS found,
                   b.unit, b.parent, b.limit_amount, b.limit_share, b.soft_stop, b.hard_stop,
                   b.state
              FROM unnest(p_budgets, p_amounts, p_charges)
                   WITH ORDINALITY AS l (budget, amount, charge, line)
              LEFT JOIN budget_budgets b ON b.root = p_root AND b.name = l.budget
            UNION ALL
            SELECT up.line, up.depth + 1, up.parent, up.amount, up.charge, b.name,
                   b.unit, b.parent, b.limit_amount, b.limit_share, b.soft_stop, b.hard_stop,
                   b.state
              FROM up
              LEFT JOIN budget_budgets b ON b.root = p_root AND b.name = up.parent
             WHERE up.parent IS NOT NULL AND up.depth < 32
        )
        SELECT up.*, w.window_us, coalesce(w.reserved, 0) AS reserved,
               coalesce(w.spent, 0) AS spent,
               (SELECT coalesce(sum(g.amount), 0)
                  FROM budget_grants g
                 WHERE g.root = p_root AND g.budget = up.name AND g.until_us > p_now) AS granted
          FROM up
          LEFT JOIN LATERAL (
              SELECT c.window_us, c.end_us, c.reserved, c.spent
                FROM budget_balances c
               WHERE c.root = p_root AND c.budget = up.name AND c.window_us <= p_now
                 AND c.stripe = 0
               ORDER BY c.window_us DESC
               LIMIT 1
          ) w ON w.end_us > p_now
         ORDER BY up.line, up.depth DESC
    LOOP
        IF v.found IS NULL THEN
            verdict := 'unknown';
            budget := v.name;
            RETURN;
        END IF;
        IF v.line <> v_line THEN
            v_line := v.line;
            v_above := NULL;
            v_before := cardinality(d_budgets);
        END IF;
        v_limit := CASE
            WHEN v.limit_share IS NULL THEN v.limit_amount
            ELSE div(v_above * v.limit_share, 1000000)
        END;
        v_blocked := coalesce(v_limit = 0, false);
        v_limit := least(v_limit + v.granted, CASE WHEN v_limit IS NOT NULL THEN c_most END);
        v_above := v_limit;
        v_bound := coalesce(div(v_limit * CASE WHEN p_finishing THEN v.hard_stop
                                               ELSE v.soft_stop END, 1000000), c_most);
        v_reason := CASE
            WHEN v.state <> 'open' THEN v.state
            WHEN v_blocked THEN 'blocked'
            WHEN v.reserved + v.spent <= v_bound - v.amount THEN NULL
            WHEN v.spent > v_bound - v.amount THEN 'exhausted'
            ELSE 'held'
        END;
        -- Of those that are short the first line's, and on its way up the lowest.
        IF v_reason IS NOT NULL AND v.line = coalesce(v_short_line, v.line) THEN
            v_short_line := v.line;
            verdict := v_reason;
            budget := v.name;
            unit := v.unit;
            requested := v.amount;
            limit_amount := coalesce(v_limit, c_most);
            most := v_bound;
            reserved := v.reserved;
            spent := v.spent;
        END IF;
        IF v.window_us IS NULL THEN
            v_unopened := v.name;
        END IF;
        v_at := array_position(d_budgets, v.name);
        IF v_at IS NULL THEN
            -- They come from the top; what is drawn on is told from the bottom.
            d_budgets := d_budgets[:v_before] || v.name || d_budgets[v_before + 1:];
            d_units := d_units[:v_before] || v.unit::text || d_units[v_before + 1:];
            d_windows := d_windows[:v_before] || v.window_us || d_windows[v_before + 1:];
            d_amounts := d_amounts[:v_before] || v.amount || d_amounts[v_before + 1:];
            d_charges := d_charges[:v_before] || v.charge || d_charges[v_before + 1:];
        ELSIF d_charges[v_at] <> v.charge THEN
            verdict := 'mixed';
            budget := v.name;
            RETURN;
        ELSE
            d_amounts[v_at] := greatest(d_amounts[v_at], v.amount);
        END IF;
    END LOOP;
    IF verdict IS NULL AND v_unopened IS NOT NULL THEN
        verdict := 'window';
        budget := v_unopened;
    END IF;
END
$$
