"""`hedgerow gateway`."""

from common.config import GatewayConfig
from common.launch import run_process
from gateway.app import main

run_process("gateway", GatewayConfig, main)
