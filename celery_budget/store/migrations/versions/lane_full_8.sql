-- How much a lane holds back. Up to five hundred messages are counted each time; of more than that
-- one admission in two seconds counts them all, and the others read what it found.
--
-- Mirrors celery_budget.store.waiting. Locks the lane's row of the count, only to count, and never
-- waits for it. A transaction that is lent to us leaves it alone, as it may be long, and nobody else
-- could count meanwhile.
CREATE FUNCTION budget_lane_waiting(
    p_root text, p_lane text, p_now bigint, p_lent boolean, OUT jobs bigint, OUT units bigint
) LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    v_counted bigint;
BEGIN
    SELECT t.jobs, t.units, t.counted_us INTO jobs, units, v_counted
      FROM budget_lane_tallies t WHERE t.root = p_root AND t.lane = p_lane;
    IF jobs > 500 AND v_counted > p_now - 2000000 THEN
        RETURN;
    END IF;
    SELECT count(*), least(coalesce(sum(w.weight), 0), 9223372036854775807) INTO jobs, units FROM (
        SELECT o.weight FROM budget_outbox o
         WHERE o.root = p_root AND o.lane = p_lane AND o.state = 'held' LIMIT 501
    ) AS w;
    IF jobs <= 500 THEN
        RETURN;
    END IF;
    IF NOT p_lent THEN
        PERFORM 1 FROM budget_lane_tallies t
          WHERE t.root = p_root AND t.lane = p_lane FOR UPDATE SKIP LOCKED;
    END IF;
    IF NOT p_lent AND NOT FOUND THEN
        -- Another one counts. What it counted last is nearer than what was just seen.
        SELECT greatest(t.jobs, jobs), greatest(t.units, units) INTO jobs, units
          FROM budget_lane_tallies t WHERE t.root = p_root AND t.lane = p_lane;
        RETURN;
    END IF;
    SELECT count(*), least(coalesce(sum(o.weight), 0), 9223372036854775807)
      INTO jobs, units
      FROM budget_outbox o
     WHERE o.root = p_root AND o.lane = p_lane AND o.state = 'held';
    IF p_lent THEN
        RETURN;
    END IF;
    UPDATE budget_lane_tallies t
       SET jobs = budget_lane_waiting.jobs, units = budget_lane_waiting.units,
           counted_us = p_now
     WHERE t.root = p_root AND t.lane = p_lane;
END
$$;
-- Why a lane takes no new request of this weight, what waits in it, and its limit; no reason where
-- it takes it. Mirrors celery_budget.core.lanes.Lane.refusal.
CREATE FUNCTION budget_lane_full(
    p_root text, p_lane text, p_weight bigint, p_now bigint, p_lent boolean,
    OUT reason text, OUT waiting bigint, OUT bound bigint
) LANGUAGE plpgsql AS $$
DECLARE
    v_lane budget_lanes;
    v_waiting record;
BEGIN
    SELECT * INTO v_lane FROM budget_lanes l WHERE l.root = p_root AND l.name = p_lane;
    bound := least(v_lane.max_queued_units, v_lane.max_running_units, v_lane.max_waiting_units);
    waiting := 0;
    IF bound < p_weight THEN
        reason := 'heavy';
        RETURN;
    END IF;
    bound := NULL;
    IF v_lane.max_waiting_jobs IS NULL AND v_lane.max_waiting_units IS NULL THEN
        RETURN;
    END IF;
    v_waiting := budget_lane_waiting(p_root, p_lane, p_now, p_lent);
    IF v_waiting.jobs >= v_lane.max_waiting_jobs THEN
        reason := 'jobs';
        waiting := v_waiting.jobs;
        bound := v_lane.max_waiting_jobs;
    ELSIF v_waiting.units > v_lane.max_waiting_units - p_weight THEN
        reason := 'units';
        waiting := v_waiting.units;
        bound := v_lane.max_waiting_units;
    END IF;
END
$$
