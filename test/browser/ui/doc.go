// Package ui tests the page of `spillway ui` in chromium, against nodes that exist only on
// paper (fakenode) and have faults.
package ui
