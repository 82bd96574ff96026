-- When a budget that was short may have room again: how long its open window lasts, and how much room
-- the last changes of that window gave back, over which time. Mirrors celery_budget.store.pace; one
-- contract suite holds both to the same. Locks nothing, and looks at 32 entries, by their key: of a
-- window that is spread at the last of each stripe, 256 in all, for the 32 that are youngest.
CREATE FUNCTION budget_pace(p_root text, p_budget text)
RETURNS TABLE (left_us bigint, freed bigint, span_us bigint) LANGUAGE sql STABLE STRICT AS $$
    WITH clock AS (
        SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint) AS now_us
    ), opened AS (
        SELECT b.window_us, b.end_us, c.now_us
          FROM clock c, budget_balances b
         WHERE b.root = p_root AND b.budget = p_budget AND b.stripe = 0
           AND b.window_us <= c.now_us
         ORDER BY b.window_us DESC
         LIMIT 1
    ), stripes AS (
        SELECT b.stripe, b.entries, b.window_us, least(32, 256 / count(*) OVER ()) AS some
          FROM opened o
          JOIN budget_balances b
            ON b.root = p_root AND b.budget = p_budget AND b.window_us = o.window_us
    ), last AS (
        SELECT j.at_us, j.reserved::numeric + j.spent AS change, j.what
          FROM stripes s, budget_journal j
         WHERE j.root = p_root AND j.budget = p_budget AND j.window_us = s.window_us
           AND j.stripe = s.stripe AND j.entry > s.entries - s.some
         ORDER BY j.at_us DESC
         LIMIT 32
    )
    SELECT CASE WHEN o.end_us < 9223372036854775807 THEN o.end_us - o.now_us END,
           (SELECT CAST(least(coalesce(sum(-l.change) FILTER (
                            WHERE l.change < 0 AND l.what NOT IN ('checkpoint', 'repair')), 0),
                        9223372036854775807) AS bigint)
              FROM last l),
           (SELECT coalesce(o.now_us - min(l.at_us), 0) FROM last l)
      FROM opened o
$$
