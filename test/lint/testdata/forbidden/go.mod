module spillway.dev/spillway

go 1.26.0
