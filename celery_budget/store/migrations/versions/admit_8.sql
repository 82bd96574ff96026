-- An admission. Mirrors celery_budget.store.batch, which serves SQLite and several requests at once;
-- one contract suite holds both to the same behaviour.
--
-- With p_queues it is new: it finds itself where it is parked, and comes after what goes ahead.
-- Without p_outbox it has no message: as 'running' it is a run in place, whose first attempt is
-- written by budget_start. With p_lent the transaction is a caller's, and may be long.
--
-- Locks: the message's order key, the new reservation's key, then the balances in the order (budget,
-- window, stripe): of a budget that is spread one stripe, or all of them where none has room alone.
-- Two calls with one request key: the second waits for the first to commit, then finds it.
-- A refusal takes no lock unless a balance was used up between the first look and the lock. With it
-- comes when there may be room again (budget_pace).
--
-- A query costs more to begin than to run here. What is no query is assigned, not performed; what most
-- requests do not need (a look at what is parked, at an earlier one of the same key) is asked for where
-- it may matter; and one budget without parents is not joined to itself.
CREATE FUNCTION budget_admit(
    p_root text, p_reservation uuid, p_owner text, p_request text, p_nesting integer,
    p_task_id text, p_task_name text, p_stage text, p_fingerprint text, p_opaque boolean,
    p_estimator text, p_version text, p_prices text, p_parent uuid, p_retries integer,
    p_unreserved boolean, p_finishing boolean, p_budgets text[], p_amounts bigint[], p_charges text[],
    p_outbox uuid, p_state text, p_again bigint, p_due bigint, p_expires bigint, p_queue text,
    p_body bytea, p_envelope text, p_rank integer, p_order_key text, p_broker text,
    p_deadline bigint, p_within bigint, p_shadows text, p_tenant text, p_weight bigint,
    p_bound bigint, p_queues boolean, p_note boolean, p_who text, p_lock_ms text,
    p_lent boolean DEFAULT false
) RETURNS TABLE (
    outcome text, reservation_id uuid, task_id text, fingerprint text, budget text, unit text,
    requested bigint, limit_amount bigint, reserved bigint, spent bigint, most bigint,
    left_us bigint, freed bigint, span_us bigint
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint);
    v_look record;
    v_locked record;
    v_existing record;
    v_parked record;
    v_ahead text;
    v_seen boolean;
    v_waits boolean;
    v_void text;
    v_inserted boolean := false;
    v_waiting bigint;
    v_lane text;
    v_full record;
    -- The earlier one; none of none. Said by time from now, it is by this clock.
    v_deadline bigint;
    v_taken smallint[];
    -- Which stripe of a budget it begins with.
    v_pick integer := get_byte(uuid_send(p_reservation), 15);
BEGIN
    v_void := set_config('lock_timeout', p_lock_ms, true);
    IF p_order_key IS NOT NULL THEN
        -- Until commit: who has the key first is seen first.
        PERFORM pg_advisory_xact_lock(hashtextextended(p_root || chr(1) || p_order_key, 0));
        v_now := CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint);
    END IF;
    SELECT q.lane INTO v_lane FROM budget_lane_queues q
     WHERE q.root = p_root AND q.queue = p_queue;
    v_deadline := least(p_deadline, v_now + p_within);
    LOOP
        v_look := budget_decide(p_root, p_budgets, p_amounts, p_charges, p_finishing, v_now, v_pick,
                                NULL, NULL);
        v_waits := p_queues AND EXISTS (SELECT 1 FROM budget_parked p WHERE p.root = p_root);
        IF v_look.verdict IS NULL AND v_waits AND NOT p_finishing THEN
            SELECT p.budget
              INTO v_ahead
              FROM unnest(v_look.d_budgets) WITH ORDINALITY AS d (budget, line)
              JOIN budget_parked p
                ON p.root = p_root AND p.budget = d.budget AND p.ahead_us IS NOT NULL
             WHERE p.ahead_us > v_now
             ORDER BY d.line
             LIMIT 1;
            IF FOUND THEN
                v_look.verdict := 'queued';
                v_look.budget := v_ahead;
                SELECT d.unit, d.amount, least(sum(b.reserved), 9223372036854775807),
                       least(sum(b.spent), 9223372036854775807)
                  INTO v_look.unit, v_look.requested, v_look.reserved, v_look.spent
                  FROM unnest(v_look.d_budgets, v_look.d_units, v_look.d_windows,
                              v_look.d_amounts) AS d (budget, unit, window_us, amount)
                  JOIN budget_balances b
                    ON b.root = p_root AND b.budget = d.budget AND b.window_us = d.window_us
                 WHERE d.budget = v_ahead
                 GROUP BY d.unit, d.amount;
                SELECT coalesce(l.amount, 9223372036854775807),
                       coalesce(div(l.amount * b.soft_stop, 1000000), 9223372036854775807)
                  INTO v_look.limit_amount, v_look.most
                  FROM budget_budgets b,
                       LATERAL (SELECT budget_limit(p_root, v_ahead, v_now) AS amount) l
                 WHERE b.root = p_root AND b.name = v_ahead;
            END IF;
        END IF;
        v_seen := false;
        IF v_look.verdict IS NOT NULL OR v_waits THEN
            -- Looked for after that: who filled the budget with this very request has committed.
            SELECT r.reservation_id, r.task_id, r.fingerprint
              INTO v_existing
              FROM budget_reservations r
             WHERE r.root = p_root AND r.owner = p_owner AND r.request_id = p_request
               AND r.nesting = p_nesting AND r.state <> 'released';
            v_seen := FOUND;
        END IF;
        IF NOT v_seen AND v_waits THEN
            SELECT p.parked_id, p.task_id, p.request
              INTO v_parked
              FROM budget_parked p
             WHERE p.root = p_root AND p.owner = p_owner AND p.task_id = p_task_id
               AND p.nesting = p_nesting AND p.reservation_id IS NULL
             LIMIT 1;
            IF FOUND THEN
                outcome := 'parked';
                reservation_id := v_parked.parked_id;
                task_id := v_parked.task_id;
                fingerprint := v_parked.request::json ->> 'fingerprint';
                RETURN NEXT;
                RETURN;
            END IF;
        END IF;
        IF NOT v_seen AND v_look.verdict IS NOT NULL THEN
            -- A repeat of this very call finds even what has been released since.
            SELECT r.reservation_id, r.task_id, r.fingerprint
              INTO v_existing
              FROM budget_reservations r
             WHERE r.root = p_root AND r.reservation_id = p_reservation;
            v_seen := FOUND;
        ELSIF NOT v_seen THEN
            INSERT INTO budget_reservations (
                root, reservation_id, owner, request_id, nesting, task_id, task_name, stage,
                fingerprint, opaque, estimator, estimator_version, prices, parent_id, state,
                retries, attempts, deliveries, unreserved, unmetered, over, created_us, charges_start,
                deadline_us, shadows, lane, due_us)
            VALUES (
                p_root, p_reservation, p_owner, p_request, p_nesting, p_task_id, p_task_name,
                p_stage, p_fingerprint, p_opaque, p_estimator, p_version, p_prices, p_parent,
                CASE WHEN p_state IN ('published', 'running') THEN p_state ELSE 'reserved' END,
                p_retries, (p_state = 'running')::integer, (p_state = 'running')::integer,
                p_unreserved, false, false, v_now, 'start' = ANY (p_charges),
                v_deadline, p_shadows, v_lane,
                CASE WHEN p_state <> 'published' THEN nullif(p_due, 0) END)
            ON CONFLICT DO NOTHING;
            v_inserted := FOUND;
            IF NOT v_inserted THEN
                -- A repeat of this very call, after a lost connection, may find even what has been
                -- released since. Otherwise somebody else admitted the same request.
                SELECT r.reservation_id, r.task_id, r.fingerprint
                  INTO v_existing
                  FROM budget_reservations r
                 WHERE r.root = p_root AND r.reservation_id = p_reservation;
                IF NOT FOUND THEN
                    SELECT r.reservation_id, r.task_id, r.fingerprint
                      INTO v_existing
                      FROM budget_reservations r
                     WHERE r.root = p_root AND r.owner = p_owner AND r.request_id = p_request
                       AND r.nesting = p_nesting AND r.state <> 'released';
                END IF;
                v_seen := FOUND;
                CONTINUE WHEN NOT v_seen;
            END IF;
        END IF;
        IF v_seen THEN
            outcome := 'existing';
            reservation_id := v_existing.reservation_id;
            task_id := v_existing.task_id;
            fingerprint := v_existing.fingerprint;
            RETURN NEXT;
            RETURN;
        END IF;
        EXIT WHEN NOT v_inserted;

        IF p_bound IS NOT NULL THEN
            v_waiting := budget_backlog(p_root, p_bound, v_now, p_lent);
            IF v_waiting IS NULL OR v_waiting >= p_bound THEN
                DELETE FROM budget_reservations r
                 WHERE r.root = p_root AND r.reservation_id = p_reservation;
                outcome := CASE WHEN v_waiting IS NULL THEN 'uncounted' ELSE 'backlog' END;
                requested := v_waiting;
                limit_amount := p_bound;
                RETURN NEXT;
                RETURN;
            END IF;
        END IF;
        -- What has a bound is new; what continues running work is held however much waits.
        IF v_lane IS NOT NULL AND p_bound IS NOT NULL AND p_state = 'due' THEN
            v_full := budget_lane_full(p_root, v_lane, p_weight, v_now, p_lent);
            IF v_full.reason IS NOT NULL THEN
                DELETE FROM budget_reservations r
                 WHERE r.root = p_root AND r.reservation_id = p_reservation;
                outcome := 'lane';
                budget := v_lane;
                unit := v_full.reason;
                requested := v_full.waiting;
                limit_amount := v_full.bound;
                RETURN NEXT;
                RETURN;
            END IF;
        END IF;
        v_locked := v_look;
        IF v_look.spread OR mod(v_pick, 8) = 0 THEN
            -- One of eight notes whether it had to wait.
            v_taken := budget_take(
                p_root, v_look.d_budgets, v_look.d_windows,
                coalesce(v_look.d_stripes,
                         array_fill(0::smallint, ARRAY[cardinality(v_look.d_budgets)])),
                v_look.d_amounts, mod(v_pick, 8) = 0);
            IF v_look.spread THEN
                v_locked.d_stripes := v_taken;
            END IF;
            v_look := budget_decide(p_root, p_budgets, p_amounts, p_charges, p_finishing, v_now,
                                    v_pick, v_locked.d_budgets, v_taken);
        ELSE
            IF cardinality(v_locked.d_budgets) = 1 THEN
                PERFORM 1
                   FROM budget_balances b
                  WHERE b.root = p_root AND b.budget = v_locked.d_budgets[1]
                    AND b.window_us = v_locked.d_windows[1] AND b.stripe = 0
                    FOR UPDATE;
            ELSE
                PERFORM 1
                   FROM budget_balances b
                   JOIN unnest(v_locked.d_budgets, v_locked.d_windows) AS k (budget, window_us)
                     ON b.budget = k.budget AND b.window_us = k.window_us
                  WHERE b.root = p_root AND b.stripe = 0
                  ORDER BY b.budget COLLATE "C", b.window_us, b.stripe
                    FOR UPDATE OF b;
            END IF;
            -- A new look, behind the locks: this one decides.
            v_look := budget_decide(p_root, p_budgets, p_amounts, p_charges, p_finishing, v_now,
                                    v_pick, NULL, NULL);
        END IF;
        EXIT WHEN v_look.verdict IS NULL AND v_look.d_budgets = v_locked.d_budgets
              AND v_look.d_windows = v_locked.d_windows
              AND v_look.d_stripes IS NOT DISTINCT FROM v_locked.d_stripes;
        DELETE FROM budget_reservations r
         WHERE r.root = p_root AND r.reservation_id = p_reservation;
        IF v_look.verdict IS NULL THEN
            -- The budgets were given other parents meanwhile, or a stripe was used up. What else is to
            -- be locked may come before what is locked already: the caller gives all of it back and
            -- calls again.
            v_look.verdict := 'moved';
            v_look.budget := p_budgets[1];
        END IF;
        EXIT;
    END LOOP;

    IF v_look.verdict IS NOT NULL THEN
        IF p_note AND v_look.verdict NOT IN ('unknown', 'window', 'mixed', 'moved') THEN
            INSERT INTO budget_refusals AS f (
                root, day, budget, stage, reason, slot, count, refusal_id, task_name, requested,
                limit_amount, reserved, spent, refused_us)
            VALUES (
                p_root, v_now / 86400000000, v_look.budget, p_stage, v_look.verdict,
                -- Of a caller's own, which may be held for long.
                CASE WHEN p_lent
                     THEN 16 + mod(256 * get_byte(uuid_send(p_reservation), 14) + v_pick, 1008)
                     ELSE v_pick & 15 END,
                1, p_reservation, p_task_name,
                v_look.requested, v_look.limit_amount, v_look.reserved, v_look.spent, v_now)
            ON CONFLICT (root, day, budget, stage, reason, slot) DO UPDATE
               SET count = f.count + 1, refusal_id = excluded.refusal_id,
                   task_name = excluded.task_name, requested = excluded.requested,
                   limit_amount = excluded.limit_amount, reserved = excluded.reserved,
                   spent = excluded.spent, refused_us = excluded.refused_us
             WHERE f.refusal_id <> excluded.refusal_id;
        END IF;
        outcome := v_look.verdict;
        budget := v_look.budget;
        unit := v_look.unit;
        requested := v_look.requested;
        limit_amount := v_look.limit_amount;
        reserved := v_look.reserved;
        spent := v_look.spent;
        most := v_look.most;
        SELECT p.left_us, p.freed, p.span_us
          INTO left_us, freed, span_us
          FROM budget_pace(p_root, v_look.budget) p;
        RETURN NEXT;
        RETURN;
    END IF;

    IF array_position(v_look.d_stripes, NULL) IS NOT NULL THEN
        v_look.d_stripes := budget_gather(p_root, v_look.d_budgets, v_look.d_windows,
                                          v_look.d_stripes, v_look.d_amounts, v_pick, v_now);
    END IF;
    IF cardinality(v_look.d_budgets) = 1 THEN
        IF v_look.d_amounts[1] > 0 THEN
            v_void := budget_move(
                p_root, v_look.d_budgets, v_look.d_windows,
                coalesce(v_look.d_stripes, ARRAY[0::smallint]), v_look.d_amounts,
                ARRAY[0::bigint], ARRAY[p_reservation], 'reserve', p_who, NULL);
        END IF;
        INSERT INTO budget_lines (
            root, reservation_id, line, budget, window_us, stripe, charge, unit,
            estimate, reserved, used, settled)
        VALUES (
            p_root, p_reservation, 0, v_look.d_budgets[1], v_look.d_windows[1],
            coalesce(v_look.d_stripes[1], 0), v_look.d_charges[1], v_look.d_units[1],
            v_look.d_amounts[1],
            v_look.d_amounts[1], 0, 0);
    ELSE
        PERFORM budget_move(
            p_root, array_agg(d.budget), array_agg(d.window_us),
            array_agg(coalesce(d.stripe, 0::smallint)),
            array_agg(d.amount), array_agg(0::bigint), array_agg(p_reservation), 'reserve', p_who, NULL)
           FROM unnest(v_look.d_budgets, v_look.d_windows, v_look.d_amounts, v_look.d_stripes)
                AS d (budget, window_us, amount, stripe)
          WHERE d.amount > 0
         HAVING count(*) > 0;
        INSERT INTO budget_lines (
            root, reservation_id, line, budget, window_us, stripe, charge, unit,
            estimate, reserved, used, settled)
        SELECT p_root, p_reservation, d.line - 1, d.budget, d.window_us, coalesce(d.stripe, 0),
               d.charge, d.unit,
               d.amount, d.amount, 0, 0
          FROM unnest(v_look.d_budgets, v_look.d_windows, v_look.d_amounts, v_look.d_charges,
                      v_look.d_units, v_look.d_stripes)
               WITH ORDINALITY AS d (budget, window_us, amount, charge, unit, stripe, line);
    END IF;
    IF p_outbox IS NOT NULL THEN
        INSERT INTO budget_outbox (
            root, outbox_id, reservation_id, parent_id, task_id, task_name, retries, state, due_us,
            expires_us, publishes, failures, created_us, published_us, queue, body, envelope,
            rank, order_key, broker, lane, tenant, weight)
        VALUES (
            p_root, p_outbox, p_reservation, NULL, p_task_id, p_task_name, p_retries,
            CASE WHEN p_state = 'due' AND v_lane IS NOT NULL THEN 'held' ELSE p_state END,
            CASE WHEN p_state = 'published' THEN v_now + p_again WHEN p_due = 0 THEN v_now ELSE p_due END,
            least(p_expires, v_deadline),
            CASE p_state WHEN 'published' THEN 1 ELSE 0 END, 0, v_now,
            CASE p_state WHEN 'published' THEN v_now END, p_queue, p_body, p_envelope,
            p_rank, p_order_key, p_broker, v_lane, p_tenant, p_weight);
    END IF;
    IF p_state = 'due' AND p_due <= v_now THEN
        v_void := budget_wake(p_root, p_lent);
    END IF;
    outcome := 'reserved';
    reservation_id := p_reservation;
    task_id := p_task_id;
    fingerprint := p_fingerprint;
    RETURN NEXT;
END
$$
