module example.org/clock

go 1.26.0
