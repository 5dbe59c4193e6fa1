"""TurtleMQ and its peers (Redis, PostgreSQL, beanstalkd, BullMQ), each in its best setup, behind one interface (`model`)."""
