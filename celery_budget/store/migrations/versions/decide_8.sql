-- What a request draws on, and whether it fits. Mirrors celery_budget.core.draws; one contract
-- suite holds both to the same behaviour. How a budget stands is read in one look at it; no locks.
--
-- A budget that is spread (whole_8.sql) is decided by one stripe, p_pick's, where that has room. Where
-- it has not, or to refuse, all of them are looked at: the next one that has room by itself is drawn
-- on, or all together, told as a stripe of NULL in d_stripes. What is locked already is drawn on as it
-- was locked: p_held, by the stripes in p_stripes. Where no budget is spread d_stripes is NULL.
--
-- verdict: NULL where it fits; unknown: there is no such budget; window: the window that is open at
-- p_now has no row yet; mixed: one budget by two rules; otherwise the reason it is refused for.
CREATE FUNCTION budget_decide(
    p_root text, p_budgets text[], p_amounts bigint[], p_charges text[], p_finishing boolean,
    p_now bigint, p_pick integer, p_held text[], p_stripes smallint[],
    OUT verdict text, OUT budget text, OUT unit text, OUT requested bigint,
    OUT limit_amount bigint, OUT most bigint, OUT reserved bigint, OUT spent bigint,
    OUT d_budgets text[], OUT d_units text[], OUT d_windows bigint[], OUT d_amounts bigint[],
    OUT d_charges text[], OUT d_stripes smallint[], OUT spread boolean
) LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    c_most CONSTANT bigint := 9223372036854775807;
    v record;
    v_line integer;
    v_name text;
    v_amount bigint;
    v_limit numeric;
    v_blocked boolean;
    v_bound bigint;
    v_at integer;
    v_reason text;
    v_mixed text;
    v_unopened text;
    v_soft bigint;
    v_alone boolean := false;
    v_whole boolean;
    v_stripe smallint := 0;
    v_other smallint;
BEGIN
    d_budgets := '{}';
    d_units := '{}';
    d_windows := '{}';
    d_amounts := '{}';
    d_charges := '{}';
    spread := false;
    FOR v_line IN 1 .. cardinality(p_budgets) LOOP
        v_name := p_budgets[v_line];
        v_amount := p_amounts[v_line];
        WHILE v_name IS NOT NULL LOOP
            SELECT b.unit, b.parent, b.limit_amount, b.limit_share, b.soft_stop, b.hard_stop,
                   b.state, b.spread, w.window_us, coalesce(w.reserved, 0) AS reserved,
                   coalesce(w.spent, 0) AS spent, w.stripe, w.share, w.basis,
                   (SELECT coalesce(sum(g.amount), 0)
                      FROM budget_grants g
                     WHERE g.root = p_root AND g.budget = v_name AND g.until_us > p_now) AS granted
              INTO v
              FROM budget_budgets b
              LEFT JOIN LATERAL (
                  SELECT c.window_us, c.end_us, c.reserved, c.spent, c.stripe, c.share, c.basis
                    FROM budget_balances c
                   WHERE c.root = p_root AND c.budget = v_name AND c.window_us <= p_now
                     AND c.stripe = CASE WHEN b.spread = 1 THEN 0 ELSE coalesce(
                         p_stripes[array_position(p_held, v_name)], mod(p_pick, b.spread)) END
                   ORDER BY c.window_us DESC
                   LIMIT 1
              ) w ON w.end_us > p_now
             WHERE b.root = p_root AND b.name = v_name;
            IF NOT FOUND THEN
                verdict := 'unknown';
                budget := v_name;
                RETURN;
            END IF;
            v_limit := v.limit_amount;
            IF v.limit_share IS NOT NULL THEN
                v_limit := div(budget_limit(p_root, v.parent, p_now) * v.limit_share, 1000000);
            END IF;
            v_blocked := coalesce(v_limit = 0, false);
            IF v_limit IS NULL THEN
                v_bound := c_most;
            ELSE
                v_limit := least(v_limit + v.granted, c_most);
                v_bound := div(v_limit * CASE WHEN p_finishing THEN v.hard_stop
                                              ELSE v.soft_stop END, 1000000);
            END IF;
            IF v.share IS NOT NULL THEN
                IF NOT spread THEN
                    spread := true;
                    d_stripes := array_fill(0::smallint, ARRAY[cardinality(d_budgets)]);
                END IF;
                v_stripe := v.stripe;
                v_whole := p_held IS NOT NULL
                           AND p_stripes[array_position(p_held, v_name)] IS NULL;
                v_soft := coalesce(div(v_limit * v.soft_stop, 1000000), c_most);
                -- The shares are of the bound for new work, which is not above the other.
                v_alone := NOT v_whole AND v.state = 'open' AND NOT v_blocked
                           AND v.basis = v_soft AND v.reserved + v.spent <= v.share - v_amount;
                IF NOT v_alone THEN
                    SELECT least(sum(c.reserved), c_most),
                           least(sum(c.spent), c_most - least(sum(c.reserved), c_most)),
                           (array_agg(c.stripe ORDER BY mod(c.stripe - v.stripe + v.spread, v.spread))
                               FILTER (WHERE c.stripe < v.spread AND c.basis = v_soft
                                         AND c.reserved + c.spent <= c.share - v_amount))[1]
                      INTO v.reserved, v.spent, v_other
                      FROM budget_balances c
                     WHERE c.root = p_root AND c.budget = v_name AND c.window_us = v.window_us;
                    v_stripe := CASE WHEN p_held IS NULL THEN v_other END;
                END IF;
            END IF;
            v_reason := CASE
                WHEN v.state <> 'open' THEN v.state
                WHEN v_blocked THEN 'blocked'
                WHEN v_alone OR v.reserved + v.spent <= v_bound - v_amount THEN NULL
                WHEN v.spent > v_bound - v_amount THEN 'exhausted'
                ELSE 'held'
            END;
            -- Of several that are short the first line's, and on its way up the lowest.
            IF verdict IS NULL AND v_reason IS NOT NULL THEN
                verdict := v_reason;
                budget := v_name;
                unit := v.unit;
                requested := v_amount;
                limit_amount := coalesce(v_limit, c_most);
                most := v_bound;
                reserved := v.reserved;
                spent := v.spent;
            END IF;
            v_at := array_position(d_budgets, v_name);
            IF v_at IS NULL THEN
                d_budgets := d_budgets || v_name;
                d_units := d_units || v.unit::text;
                d_windows := d_windows || v.window_us;
                d_amounts := d_amounts || v_amount;
                d_charges := d_charges || p_charges[v_line];
                IF spread THEN
                    d_stripes := d_stripes || v_stripe;
                END IF;
                IF v.window_us IS NULL THEN
                    v_unopened := v_name;
                END IF;
            ELSIF d_charges[v_at] <> p_charges[v_line] THEN
                v_mixed := coalesce(v_mixed, v_name);
            ELSIF v_amount > d_amounts[v_at] THEN
                d_amounts[v_at] := v_amount;
                IF spread THEN
                    d_stripes[v_at] := v_stripe;
                END IF;
            END IF;
            IF v.share IS NOT NULL THEN
                v_stripe := 0;
                v_alone := false;
            END IF;
            v_name := v.parent;
        END LOOP;
    END LOOP;
    IF v_mixed IS NOT NULL THEN
        verdict := 'mixed';
        budget := v_mixed;
    ELSIF verdict IS NULL AND v_unopened IS NOT NULL THEN
        verdict := 'window';
        budget := v_unopened;
    END IF;
END
$$
