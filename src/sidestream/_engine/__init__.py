"""Operations: the event loop on which they run, the calls that wait for them, and the handles of those in progress."""
