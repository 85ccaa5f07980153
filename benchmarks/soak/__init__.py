"""Hours of mixed load on one server: answers, pages, threads, memory and counters must come out right."""
