-- The limit of a budget that is in force at p_now, grants included; NULL for none.
CREATE FUNCTION budget_limit(p_root text, p_budget text, p_now bigint)
RETURNS numeric LANGUAGE plpgsql AS $$
DECLARE
    v record;
    v_limit numeric;
BEGIN
    SELECT b.parent, b.limit_amount, b.limit_share,
           (SELECT coalesce(sum(g.amount), 0)
              FROM budget_grants g
             WHERE g.root = p_root AND g.budget = p_budget AND g.until_us > p_now) AS granted
      INTO v
      FROM budget_budgets b
     WHERE b.root = p_root AND b.name = p_budget;
    v_limit := v.limit_amount;
    IF v.limit_share IS NOT NULL THEN
        v_limit := div(budget_limit(p_root, v.parent, p_now) * v.limit_share, 1000000);
    END IF;
    IF v_limit IS NOT NULL THEN
        v_limit := least(v_limit + v.granted, 9223372036854775807);
    END IF;
    RETURN v_limit;
END
$$
