-- The first of the named budgets that does not exist (unit is NULL), is blocked by a limit of 0,
-- or does not have the amount.
-- One snapshot, no locks.
CREATE FUNCTION budget_short(p_root text, p_budgets text[], p_amounts bigint[])
RETURNS TABLE (
    budget text, unit text, requested bigint, limit_amount bigint, reserved bigint, spent bigint
) LANGUAGE sql STABLE AS $$
    SELECT l.budget, b.unit, l.amount, b.limit_amount, s.reserved, s.spent
      FROM unnest(p_budgets, p_amounts) WITH ORDINALITY AS l (budget, amount, line)
      LEFT JOIN budget_budgets b ON b.root = p_root AND b.name = l.budget
      LEFT JOIN LATERAL (
          SELECT CAST(sum(s.reserved) AS bigint) AS reserved, CAST(sum(s.spent) AS bigint) AS spent
            FROM budget_balances s
           WHERE s.root = p_root AND s.budget = l.budget AND s.window_us = 0
      ) s ON true
     WHERE b.name IS NULL
        OR b.limit_amount = 0
        OR s.reserved + s.spent > coalesce(b.limit_amount, 9223372036854775807) - l.amount
     ORDER BY l.line
     LIMIT 1
$$
