package suite

import "math"

// sharesTries is the number of tries where the shares of servers count. Equal shares instead
// of 3 and 1 give a χ² of 67 then.
const sharesTries = 200

// chiSquare returns Pearson's χ² of the answers against shares of servers. An answer of a
// server with share 0 makes it infinite.
func chiSquare(answers map[string]int, servers []string, shares []int) (x float64) {
	tries, sum := 0, 0
	for i, s := range servers {
		tries += answers[s]
		sum += shares[i]
	}
	for i, s := range servers {
		expected := float64(tries*shares[i]) / float64(sum)
		if shares[i] == 0 {
			if answers[s] > 0 {
				return math.Inf(1)
			}
			continue
		}
		off := float64(answers[s]) - expected
		x += off * off / expected
	}
	return x
}

// chiSquareLimits has the χ² that right shares exceed once in 10⁹ runs, by degrees of
// freedom.
var chiSquareLimits = []float64{0, 37.3, 41.4, 44.8, 47.9}

// chiSquareLimit returns the largest allowed χ² for so many servers.
func chiSquareLimit(servers int) float64 { return chiSquareLimits[servers-1] }
