-- Charges what is charged at the start: a part of claiming a first attempt.
--
-- Locks: the balances of these lines, in the order (budget, window, stripe); the caller holds the row
-- of the reservation.
CREATE FUNCTION budget_charge(p_root text, p_reservation uuid, p_who text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM budget_move(
        p_root, array_agg(l.budget::text), array_agg(l.window_us), array_agg(l.stripe),
        array_agg(-l.reserved), array_agg(l.reserved), array_agg(p_reservation), 'start',
        p_who, NULL)
       FROM (
        SELECT n.budget, n.window_us, n.stripe, n.reserved
          FROM budget_lines n
         WHERE n.root = p_root AND n.reservation_id = p_reservation AND n.charge = 'start'
           AND n.reserved > 0
         ORDER BY n.line
       ) AS l
     HAVING count(*) > 0;
    UPDATE budget_lines l
       SET used = l.used + l.reserved, settled = l.settled + l.reserved, reserved = 0
     WHERE l.root = p_root AND l.reservation_id = p_reservation AND l.charge = 'start';
END
$$
