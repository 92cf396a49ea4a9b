module spillway.dev/spillway

go 1.26.0

require example.org/clock v0.0.0

replace example.org/clock => ./clock
