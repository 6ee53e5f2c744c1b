"""`hedgerow gateway`."""

from common.config import GatewayConfig
from common.deploy.launch import run_process
from gateway.process import main

run_process("gateway", GatewayConfig, main)
