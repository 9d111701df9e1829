"""What clients and operators ask a broker: frames and HTTP."""
