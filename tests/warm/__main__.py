import sys

from tests.warm import serve

serve(sys.argv[1], int(sys.argv[2]))
