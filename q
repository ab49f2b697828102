drvfuse record 1	{"devices": 1, "arch": "sm_90a", "seed": 0, "race": false, "sm_count": 132, "memory_bytes": 1073741824, "delay_stores": false, "check_initialised": true}
0	end
