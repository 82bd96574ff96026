-- What a running attempt used, in one round trip. Mirrors celery_budget.store.usage.record, which
-- serves SQLite and what is left to it here; one contract suite holds both to the same behaviour.
--
-- Of p_units a null one stands for the first unit that is charged by use. With p_reply those are left
-- out that the request does not draw on.
--
-- 'general' is answered, and nothing is changed: of what has ended, or has records that do not tell
-- all; where some of its units are recorded and some are not; where it is to raise.
--
-- Locks: the reservation; its balances in the order (budget, window, stripe) where the total passes
-- what is held.
CREATE FUNCTION budget_record(
    p_root text, p_reservation uuid, p_attempt integer, p_key text, p_units text[],
    p_amounts bigint[], p_reply boolean, p_details text, p_who text, p_lock_ms text
) RETURNS TABLE (
    outcome text, units text[], budget text, unit text, used bigint, reserved bigint
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    c_most CONSTANT numeric := 9223372036854775807;
    v_row record;
    v_first text;
    v_units text[];
    v_amounts bigint[];
    v_known bigint;
    v_over record;
BEGIN
    PERFORM set_config('lock_timeout', p_lock_ms, true);
    SELECT r.state, r.unmetered INTO v_row
      FROM budget_reservations r
     WHERE r.root = p_root AND r.reservation_id = p_reservation
       FOR NO KEY UPDATE;
    IF NOT FOUND OR v_row.state IN ('settled', 'released', 'lost') OR v_row.unmetered THEN
        RETURN QUERY SELECT 'general', NULL::text[], NULL::text, NULL::text, NULL::bigint,
            NULL::bigint;
        RETURN;
    END IF;
    SELECT l.unit INTO v_first
      FROM budget_lines l
     WHERE l.root = p_root AND l.reservation_id = p_reservation AND l.charge = 'used'
     ORDER BY l.line
     LIMIT 1;
    SELECT array_agg(d.unit ORDER BY d.place), array_agg(d.amount ORDER BY d.place),
           count(u.unit)
      INTO v_units, v_amounts, v_known
      FROM (
        SELECT coalesce(g.unit, v_first) AS unit, g.amount,
               -- Of a reply the units are told in the order of the lines.
               CASE WHEN p_reply THEN min(l.line) ELSE min(g.nth) END AS place
          FROM unnest(p_units, p_amounts) WITH ORDINALITY AS g (unit, amount, nth)
          LEFT JOIN budget_lines l
            ON l.root = p_root AND l.reservation_id = p_reservation AND l.charge = 'used'
           AND l.unit = coalesce(g.unit, v_first)
         GROUP BY g.nth, g.unit, g.amount
        HAVING count(l.line) > 0 OR NOT p_reply
      ) AS d
      LEFT JOIN budget_usage u
        ON u.root = p_root AND u.reservation_id = p_reservation AND u.key = p_key
       AND u.unit = d.unit;
    IF v_units IS NULL
       OR v_known NOT IN (0, cardinality(v_units))
       OR cardinality(v_units) <> (SELECT count(DISTINCT n.unit) FROM unnest(v_units) AS n (unit))
       OR EXISTS (
            SELECT 1 FROM unnest(v_units) AS n (unit)
             WHERE NOT EXISTS (
                SELECT 1 FROM budget_lines l
                 WHERE l.root = p_root AND l.reservation_id = p_reservation
                   AND l.charge = 'used' AND l.unit = n.unit))
       OR (v_known = 0 AND EXISTS (
            SELECT 1 FROM budget_lines l
              JOIN unnest(v_units, v_amounts) AS d (unit, amount) ON l.unit = d.unit
             WHERE l.root = p_root AND l.reservation_id = p_reservation AND l.charge = 'used'
               AND l.used::numeric + d.amount > c_most))
    THEN
        RETURN QUERY SELECT 'general', NULL::text[], NULL::text, NULL::text, NULL::bigint,
            NULL::bigint;
        RETURN;
    END IF;
    IF v_known > 0 THEN
        -- An attempt was given a reply that an earlier one had recorded: it is metered.
        UPDATE budget_usage u SET repeated_by = p_attempt
         WHERE u.root = p_root AND u.reservation_id = p_reservation AND u.key = p_key
           AND u.unit = ANY (v_units) AND u.attempt < p_attempt;
        -- What was there is to be on the synchronous standbys before it is told.
        IF current_setting('synchronous_standby_names') <> '' THEN
            PERFORM pg_logical_emit_message(true, 'celery_budget', '');
        END IF;
        RETURN QUERY SELECT 'already', v_units, NULL::text, NULL::text, NULL::bigint, NULL::bigint;
        RETURN;
    END IF;
    INSERT INTO budget_usage (
        root, reservation_id, key, unit, attempt, amount, late, recorded_us, details)
    SELECT p_root, p_reservation, p_key, d.unit, p_attempt, d.amount, false,
           CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint), p_details
      FROM unnest(v_units, v_amounts) AS d (unit, amount);
    -- The first that holds less than it has used then.
    SELECT l.budget::text AS budget, l.unit::text AS unit, l.used + d.amount AS used, l.reserved
      INTO v_over
      FROM budget_lines l
      JOIN unnest(v_units, v_amounts) WITH ORDINALITY AS d (unit, amount, nth) ON l.unit = d.unit
     WHERE l.root = p_root AND l.reservation_id = p_reservation AND l.charge = 'used'
       AND l.used + d.amount > l.reserved
     ORDER BY d.nth, l.line
     LIMIT 1;
    IF FOUND THEN
        PERFORM budget_move(
            p_root, array_agg(m.budget::text ORDER BY m.nth, m.line),
            array_agg(m.window_us ORDER BY m.nth, m.line),
            array_agg(m.stripe ORDER BY m.nth, m.line),
            array_agg(m.more ORDER BY m.nth, m.line), array_agg(0::bigint),
            array_agg(p_reservation), 'exceed', p_who, NULL)
           FROM (
            SELECT l.budget, l.window_us, l.stripe, l.line, d.nth,
                   l.used + d.amount - l.reserved AS more
              FROM budget_lines l
              JOIN unnest(v_units, v_amounts) WITH ORDINALITY AS d (unit, amount, nth)
                ON l.unit = d.unit
             WHERE l.root = p_root AND l.reservation_id = p_reservation AND l.charge = 'used'
               AND l.used + d.amount > l.reserved
           ) AS m;
        UPDATE budget_reservations r SET over = true
         WHERE r.root = p_root AND r.reservation_id = p_reservation;
    END IF;
    UPDATE budget_lines l
       SET used = l.used + d.amount, reserved = greatest(l.reserved, l.used + d.amount)
      FROM unnest(v_units, v_amounts) AS d (unit, amount)
     WHERE l.root = p_root AND l.reservation_id = p_reservation AND l.charge = 'used'
       AND l.unit = d.unit;
    RETURN QUERY SELECT 'recorded', v_units, v_over.budget, v_over.unit, v_over.used,
        v_over.reserved;
END
$$
