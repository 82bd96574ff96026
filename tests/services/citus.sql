-- Stands in for the Citus extension on one PostgreSQL: it has the functions by which tables and
-- functions are distributed, refuses what Citus documents that it refuses, and notes what was asked.
-- It moves nothing. By Citus' documentation of its functions and of its limits, from version 11 on.
SET allow_system_table_mods = on;
INSERT INTO pg_extension (oid, extname, extowner, extnamespace, extrelocatable, extversion)
VALUES (999999, 'citus', 10, 'pg_catalog'::regnamespace, false, '13.2-1');
RESET allow_system_table_mods;

CREATE TABLE pg_dist_node (
    nodename text, noderole text NOT NULL, isactive boolean NOT NULL, shouldhaveshards boolean NOT NULL
);
INSERT INTO pg_dist_node VALUES ('a', 'primary', true, true), ('b', 'primary', true, true);

CREATE TABLE pg_dist_partition (
    logicalrelid regclass PRIMARY KEY, partmethod "char" NOT NULL, partkey text, colocationid integer
);
CREATE TABLE distributed_functions (
    signature regprocedure PRIMARY KEY, argument text, colocated_with regclass, forced boolean
);

CREATE FUNCTION create_reference_table(table_name regclass) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO pg_dist_partition VALUES (table_name, 'n', NULL, 0);
END
$$;

CREATE FUNCTION create_distributed_table(
    table_name regclass, distribution_column text, distribution_type text DEFAULT 'hash',
    colocate_with text DEFAULT 'default', shard_count integer DEFAULT NULL
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_column pg_attribute;
    v_group integer;
    v_said text;
BEGIN
    SELECT * INTO v_column FROM pg_attribute
     WHERE attrelid = table_name AND attname = distribution_column AND NOT attisdropped;
    IF NOT FOUND THEN
        RAISE 'column "%" of relation "%" does not exist', distribution_column, table_name;
    END IF;
    SELECT i.indexrelid::regclass::text INTO v_said FROM pg_index i
     WHERE i.indrelid = table_name AND (i.indisunique OR i.indisexclusion)
       AND NOT v_column.attnum = ANY (i.indkey[0 : i.indnkeyatts - 1]);
    IF FOUND THEN
        RAISE 'cannot create constraint on "%": % does not have the distribution column',
            table_name, v_said;
    END IF;
    IF EXISTS (SELECT 1 FROM pg_attribute WHERE attrelid = table_name
                  AND attidentity <> '' AND atttypid <> 'bigint'::regtype) THEN
        RAISE 'cannot distribute "%": an identity column that is no bigint', table_name;
    END IF;
    IF EXISTS (SELECT 1 FROM pg_trigger WHERE tgrelid = table_name AND NOT tgisinternal) THEN
        RAISE 'cannot distribute relation "%" because it has triggers', table_name;
    END IF;
    IF EXISTS (SELECT 1 FROM pg_rewrite WHERE ev_class = table_name) THEN
        RAISE 'the rule system is not supported ("%")', table_name;
    END IF;
    IF EXISTS (SELECT 1 FROM pg_inherits WHERE table_name IN (inhrelid, inhparent)) THEN
        RAISE 'cannot distribute "%": inheritance', table_name;
    END IF;
    IF colocate_with = 'none' THEN
        SELECT coalesce(max(colocationid), 0) + 1 INTO v_group FROM pg_dist_partition;
    ELSE
        SELECT p.colocationid INTO v_group
          FROM pg_dist_partition p
          JOIN pg_attribute a ON a.attrelid = p.logicalrelid AND a.attname = p.partkey
         WHERE p.logicalrelid = colocate_with::regclass AND a.atttypid = v_column.atttypid
           AND a.attcollation = v_column.attcollation;
        IF NOT FOUND THEN
            RAISE 'cannot colocate tables % and %', table_name, colocate_with;
        END IF;
    END IF;
    -- A foreign key stays in the group and has the column on both sides, or leads to a reference table.
    SELECT c.conname INTO v_said FROM pg_constraint c
      LEFT JOIN pg_dist_partition t ON t.logicalrelid = c.confrelid
     WHERE c.contype = 'f' AND c.conrelid = table_name AND NOT coalesce(t.partmethod = 'n', false)
       AND NOT (c.confrelid = table_name OR coalesce(t.colocationid = v_group, false))
        OR c.contype = 'f' AND c.conrelid = table_name AND NOT coalesce(t.partmethod = 'n', false)
       AND NOT v_column.attnum = ANY (c.conkey)
        OR c.contype = 'f' AND c.confrelid = table_name AND c.conrelid <> table_name;
    IF FOUND THEN
        RAISE 'cannot create foreign key constraint "%" of "%"', v_said, table_name;
    END IF;
    INSERT INTO pg_dist_partition VALUES (table_name, 'h', distribution_column, v_group);
END
$$;

CREATE FUNCTION create_distributed_function(
    function_name regprocedure, distribution_arg_name text DEFAULT NULL,
    colocate_with text DEFAULT 'default', force_delegation boolean DEFAULT NULL
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_type regtype;
BEGIN
    IF distribution_arg_name IS NULL THEN
        IF force_delegation THEN
            RAISE 'a function without a distribution argument cannot be delegated by force';
        END IF;
        INSERT INTO distributed_functions VALUES (function_name, NULL, NULL, false)
        ON CONFLICT DO NOTHING;
        RETURN;
    END IF;
    SELECT p.proargtypes[n - 1] INTO v_type
      FROM pg_proc p, generate_series(1, p.pronargs) AS n
     WHERE p.oid = function_name AND p.proargnames[n] = distribution_arg_name;
    IF NOT FOUND THEN
        RAISE 'cannot distribute the function "%": no argument %', function_name,
            distribution_arg_name;
    END IF;
    PERFORM 1 FROM pg_dist_partition p
       JOIN pg_attribute a ON a.attrelid = p.logicalrelid AND a.attname = p.partkey
      WHERE p.logicalrelid = colocate_with::regclass AND p.partmethod = 'h'
        AND (a.atttypid = v_type OR v_type = 'text'::regtype AND a.atttypid = 'varchar'::regtype);
    IF NOT FOUND THEN
        RAISE 'cannot colocate function "%" and table "%"', function_name, colocate_with;
    END IF;
    INSERT INTO distributed_functions
    VALUES (function_name, distribution_arg_name, colocate_with::regclass, force_delegation)
    ON CONFLICT (signature) DO UPDATE SET forced = excluded.forced;
END
$$;
