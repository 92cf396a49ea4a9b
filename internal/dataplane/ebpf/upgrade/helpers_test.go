package upgrade

import "testing"

// setMigrations are those known until the test ends.
func setMigrations(t *testing.T, m map[int]Migration) {
	t.Helper()
	was := Migrations
	Migrations = m
	t.Cleanup(func() { Migrations = was })
}
