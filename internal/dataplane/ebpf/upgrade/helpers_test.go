package upgrade

import "testing"

func noError(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// setMigrations are those known until the test ends.
func setMigrations(t *testing.T, m map[int]Migration) {
	t.Helper()
	was := Migrations
	Migrations = m
	t.Cleanup(func() { Migrations = was })
}
