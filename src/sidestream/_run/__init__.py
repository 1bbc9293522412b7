"""What a run needs beside saving and loading: which steps stay, who reads them, what comes next, how it ends."""
