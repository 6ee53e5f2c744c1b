"""How processes start, alone or as a suite under supervisord."""
