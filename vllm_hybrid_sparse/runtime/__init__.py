"""The wiring of kernels, threads and settings for one worker process."""
