PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE prices (
        cloud TEXT NOT NULL,
        region TEXT NOT NULL,
        zone TEXT NOT NULL,
        instance_type TEXT NOT NULL,
        spot INTEGER NOT NULL,
        since_s REAL NOT NULL,
        seen_s REAL NOT NULL,
        usd_per_hour REAL NOT NULL,
        source TEXT NOT NULL,
        PRIMARY KEY (cloud, zone, instance_type, spot, since_s)
    ) STRICT;
INSERT INTO "prices" VALUES('cloud-11','region-12','zone-13','instance_type-14',1,16.25,17.25,15.25,'source-18');
CREATE TABLE questions (
        scope TEXT PRIMARY KEY,
        asked_s REAL NOT NULL
    ) STRICT;
INSERT INTO "questions" VALUES('scope-1',2.25);
CREATE TABLE vms (
        job TEXT NOT NULL,
        vm_id TEXT NOT NULL,
        cloud TEXT NOT NULL,
        region TEXT NOT NULL,
        zone TEXT NOT NULL,
        instance_type TEXT NOT NULL,
        spot INTEGER NOT NULL,
        from_s REAL NOT NULL,
        until_s REAL NOT NULL,
        ended TEXT NOT NULL,
        PRIMARY KEY (job, vm_id)
    ) STRICT;
INSERT INTO "vms" VALUES('job-5','vm-6','cloud-1','region-2','zone-3','type-4',1,3600.0,9000.0,'kill');
COMMIT;
