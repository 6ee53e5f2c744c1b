"""`hedgerow worker`."""

from common.config import WorkerConfig
from common.deploy.process import run_process
from worker.process.server import main

run_process("worker", WorkerConfig, main)
