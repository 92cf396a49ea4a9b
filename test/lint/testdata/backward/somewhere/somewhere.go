package somewhere
