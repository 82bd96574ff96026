-- Locks names that are in no row yet, until commit: see celery_budget.store.advisory. A function that
-- is given the root, so that where a ledger is distributed the lock is had on that root's node, as
-- that of an order key is which budget_reserve takes.
CREATE FUNCTION budget_lock(p_root text, p_kind integer, p_names text[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(h)
       FROM (SELECT DISTINCT hashtextextended(p_root || chr(p_kind) || k, 0) AS h
               FROM unnest(p_names) AS k ORDER BY h) AS hashes;
END
$$;

-- As above, of one name; false, and without a wait, where somebody else has it.
CREATE FUNCTION budget_try_lock(p_root text, p_kind integer, p_name text) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    RETURN pg_try_advisory_xact_lock(hashtextextended(p_root || chr(p_kind) || p_name, 0));
END
$$
