"""`hedgerow worker`."""

from common.config import WorkerConfig
from common.launch import run_process
from worker.server import main

run_process("worker", WorkerConfig, main)
