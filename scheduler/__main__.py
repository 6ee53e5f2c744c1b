"""`hedgerow scheduler`."""

from common.config import SchedulerConfig
from common.deploy.process import run_process
from scheduler.server import main

run_process("scheduler", SchedulerConfig, main)
