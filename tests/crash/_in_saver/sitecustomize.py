"""Every Python that has this folder on its path imports this; it does something in a writer process only."""

import json
import os
import sys

if "SIDESTREAM_SAVER_TRIAL" in os.environ and any("sidestream._worker.main" in one for one in sys.orig_argv):
    sys.path.append(os.path.dirname(os.path.dirname(__file__)))
    from _saver_trial import begin

    begin(json.loads(os.environ["SIDESTREAM_SAVER_TRIAL"]))
