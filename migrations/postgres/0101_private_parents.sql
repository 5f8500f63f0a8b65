ALTER TABLE jobs ADD COLUMN parent_private BIGINT NOT NULL DEFAULT 0;
-- Whether a fork that others see began from a job that they do not see: then its `parent_job` is shown to those alone who see that job.
UPDATE jobs SET parent_private = 1 WHERE private = 0 AND parent_job IN (SELECT id FROM jobs WHERE private <> 0);
-- What was said when such a fork was made.
UPDATE jobs SET cause = replace(cause, parent_job, 'a private job'), reason = replace(reason, parent_job, 'a private job')
    WHERE parent_private <> 0;
UPDATE events SET body = replace(body, (SELECT parent_job FROM jobs WHERE jobs.id = events.job_id), 'a private job')
    WHERE seq = 1 AND job_id IN (SELECT id FROM jobs WHERE parent_private <> 0);
