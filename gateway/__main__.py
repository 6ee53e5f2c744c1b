"""`hedgerow gateway`."""

from common.config import GatewayConfig
from common.deploy.process import run_process
from gateway.process import main

run_process("gateway", GatewayConfig, main)
