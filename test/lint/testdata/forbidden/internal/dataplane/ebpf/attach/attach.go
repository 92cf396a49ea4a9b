package attach
