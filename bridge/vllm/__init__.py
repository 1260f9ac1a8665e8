"""The out-of-tree KV connector for vLLM: set kv_connector "BridgeConnector" and kv_connector_module_path "bridge.vllm.connector"."""
